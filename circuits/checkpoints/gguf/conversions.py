"""Undo what llama.cpp's converter did to the numbers of a tensor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import QkovError
from ..pickles.placeholders import DamagedError
from .names import Source


@dataclass(frozen=True)
class Heads:
    """The numbers of heads that the metadata state, for all layers or for each.

    Attributes:
        address: The address of the file, for messages.
        query: Number of query heads.
        key_value: Number of heads of keys and values.
    """

    address: str
    query: int | list[int] | None
    key_value: int | list[int] | None

    def of_layer(self, layer: int) -> tuple[int, int]:
        """Return the numbers of query heads and of key-value heads of a layer.

        Raises:
            QkovError: They are not stated, or do not go together.
        """
        query, key_value = (
            numbers[layer] if isinstance(numbers, list) and layer < len(numbers) else numbers
            for numbers in (self.query, self.key_value)
        )
        if type(query) is not int or type(key_value) is not int or min(query, key_value) < 1 or query % key_value:
            raise QkovError(
                f"{self.address} states {query!r:.40} query heads and {key_value!r:.40} key-value heads for layer "
                f"{layer}, so the order of their weights is not known; convert the model again"
            )
        return query, key_value


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of each head in the order in which i and i + d_head/2 rotate together, not 2i and 2i + 1.

    Args:
        rows: The rows of all heads, or a number for each.
        heads: The number of heads.
    """
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def regrouped(rows: Tensor, query: int, key_value: int) -> Tensor:
    """Return the rows of all queries, all keys and all values by groups: the queries of a group, its key, its value.

    Args:
        rows: The rows, or a number for each.
        query: The number of query heads.
        key_value: The number of heads of keys and values.
    """
    width = rows.shape[0] // (query + 2 * key_value)
    queries, keys, values = rows.split([query * width, key_value * width, key_value * width])
    parts = queries, keys, values
    grouped = [part.reshape(key_value, -1, width, *rows.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(rows.shape)


def _demand_parts(rows: Tensor, parts: int, source: Source) -> None:
    if rows.ndim < 1 or rows.shape[0] % parts:
        shape = list(rows.shape)
        raise DamagedError(f"{source.stored.name} of shape {shape} does not consist of {parts} equal parts")


def _unpermuted(tensor: Tensor, source: Source, heads: Heads) -> Tensor:
    if source.module not in ("attn_q", "attn_k"):
        return tensor
    query, key_value = heads.of_layer(source.layer)
    number = query if source.module == "attn_q" else key_value
    _demand_parts(tensor, 2 * number, source)
    return unpermuted(tensor, number)


def _regrouped(tensor: Tensor, source: Source, heads: Heads) -> Tensor:
    if source.module != "attn_qkv":
        return tensor
    query, key_value = heads.of_layer(source.layer)
    _demand_parts(tensor, query + 2 * key_value, source)
    return regrouped(tensor, query, key_value)


def _transposed(tensor: Tensor, source: Source, _heads: Heads) -> Tensor:
    return tensor.T if tensor.ndim == 2 and source.module in ("attn_qkv", "attn_output") else tensor


def _minus_one(tensor: Tensor, source: Source, _heads: Heads) -> Tensor:
    # In float64, so that adding 1 again gives back the stored number.
    return tensor.double() - 1 if source.part == "weight" and source.module.endswith("norm") else tensor


#: How each change of the converter is undone.
CONVERSIONS: dict[str, Callable[[Tensor, Source, Heads], Tensor]] = {
    "permuted": _unpermuted,
    "grouped": _regrouped,
    "transposed": _transposed,
    "gains plus one": _minus_one,
}
