"""Composition between heads: how much a later head reads of what an earlier head writes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..algebra.circuit import Circuit
from ..algebra.products import multiply, upcast
from ..errors import QkovError
from .attention_weights import AttentionWeights
from .norms import Basis

#: float32 is accurate enough at this rank or above, and for scores above this.
_AVERAGED, _SURE = 32, 0.01


@dataclass(frozen=True, eq=False)
class LayerComposition:
    """The composition scores between the heads of two layers of one stack.

    Attributes:
        stack: The stack of both layers.
        earlier: The number of the layer that writes.
        later: The number of the layer that reads.
        scores: The scores by kind; Q, K or V says which of the later head's matrices reads. NaN if a circuit is zero or
            not finite.
        chance: The root mean square of a score between independent circuits.
    """

    stack: str
    earlier: int
    later: int
    scores: dict[str, Float64[Tensor, "earlier_head later_head"]]
    chance: float


class _Side(NamedTuple):
    """The side of a circuit that meets the stream, scaled to norm one.

    `fast` is in float32 if that is accurate enough.
    """

    exact: Float64[Tensor, "head rank width"]
    fast: Float[Tensor, "head rank width"]


def composition_scores(
    layers: Iterable[AttentionWeights], basis: Basis = "raw", rotary_offset: int = 0
) -> list[LayerComposition]:
    """Compute the composition scores between all heads of every two layers of a stack (Elhage et al. 2021).

    | kind | score, between 0 and 1 |
    |---|---|
    | Q | norm(W_QK W_OV) / (norm(W_QK) norm(W_OV)) |
    | K | norm(W_QK' W_OV) / (norm(W_QK) norm(W_OV)) |
    | V | norm(W_OV,later W_OV) / (norm(W_OV,later) norm(W_OV)) |

    Norms are Frobenius norms; W_OV is the earlier head's, W_QK and W_OV,later are the later head's. A score means
    something only in comparison with `chance`: between circuits whose directions in the residual stream are drawn
    independently, such as Gaussian ones, the mean squared score is 1/d_model whatever their rank, or 1/(d_model - 1) if
    both sides are centred. The mean score is below the root of that, by 0.01 % for Gaussian factors with d_model = 768
    and d_head = 64, and by a fifth for d_head = 1.

    The far side of each circuit is replaced by a triangle of size d_head, so that one product of [heads d_head,
    d_model] and [d_model, heads d_head] serves two layers and nothing of size d_model x d_model is formed. The relative
    error is below 1e-6. What the layers write stays in memory: d_model heads d_head numbers for each layer, in both
    float64 and float32.

    Layers of different stacks write to different streams and are not compared. Cross-attention, whose keys and values
    read another stream than its queries, is left out.

    Args:
        layers: The layers in order.
        basis: The basis of the weights.
        rotary_offset: The offset of W_QK in positions, the query's minus the key's.

    Returns:
        The scores of every pair of an earlier and a later layer.

    Raises:
        CallError: The weights cannot be converted to the basis or the offset.
        QkovError: A layer reads a stream of another width than an earlier layer wrote.
    """
    compositions = []
    written: dict[str, list[tuple[int, _Side]]] = {}
    for weights in layers:
        if weights.facts.cross:
            continue
        weights = weights.in_basis(basis)
        readers, writer = _readers_and_writer(weights.circuits(basis, rotary_offset))
        earlier_layers = written.setdefault(weights.stack, [])
        for earlier, earlier_writer in earlier_layers:
            _demand_one_width(readers, earlier_writer, weights, earlier)
            scores = {kind: _scores(reader, earlier_writer) for kind, reader in readers.items()}
            chance = _chance(weights, width=earlier_writer.exact.shape[-1])
            compositions.append(LayerComposition(weights.stack, earlier, weights.layer, scores, chance))
        if writer is not None:
            earlier_layers.append((weights.layer, writer))
    return compositions


def _readers_and_writer(circuits: dict[str, Circuit]) -> tuple[dict[str, _Side], _Side | None]:
    """Return the sides of the circuits that read the stream, by kind, and the side that writes.

    Q reads with the columns of W_QK, K with its rows, and V with the columns of W_OV.
    """
    readers, writer = {}, None
    if "QK" in circuits:
        readers["Q"], readers["K"] = _sides(circuits["QK"])
    if "OV" in circuits:
        readers["V"], writer = _sides(circuits["OV"])
    return readers, writer


def _sides(circuit: Circuit) -> tuple[_Side, _Side]:
    """Return small matrices that replace C and C' in products with a matrix on their right.

    With T'T = left'left, T right has the norm of C, also after both are multiplied by the same matrix from the right.
    """
    triangles = circuit.reduction()
    if circuit.right is None:
        matrix = upcast(circuit.left)
        return _normalized(matrix), _normalized(matrix.mT)
    assert triangles.right is not None
    columns = multiply(_rotated(triangles.left), circuit.right)
    rows = multiply(_rotated(triangles.right.mT), circuit.left.mT)
    return _normalized(columns), _normalized(rows)


def _normalized(side: Float64[Tensor, "head rank width"]) -> _Side:
    side = side / torch.linalg.matrix_norm(side)[:, None, None]
    # A program may have allowed products that are less accurate than float32 itself.
    serves = side.shape[1] >= _AVERAGED and torch.get_float32_matmul_precision() == "highest"
    return _Side(side, side.float() if serves else side)


def _rotated(triangle: Float64[Tensor, "head size rank"]) -> Float64[Tensor, "head size rank"]:
    """Mix the rows of the triangle, so that what a head reads or writes is spread over all of them even at rank one."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(triangle.shape[-2], triangle.shape[-2], dtype=torch.float64, generator=generator)
    return torch.linalg.qr(mixing).Q.to(triangle.device) @ triangle


def _scores(reader: _Side, writer: _Side) -> Float64[Tensor, "earlier_head later_head"]:
    """Return the norm of reader @ writer' for every pair of heads, from a float32 product if that is accurate enough.

    Rounding errors have random signs and average out over rank^2 entries, which leaves about 2^-24/rank: below 1e-6 of
    a score above `_SURE`. Smaller scores are computed again in float64.
    """
    rough = reader.fast.dtype == writer.fast.dtype == torch.float32
    one, other = (reader.fast, writer.fast) if rough else (reader.exact, writer.exact)
    product = one.flatten(0, 1) @ other.flatten(0, 1).mT
    blocks = product.reshape(*one.shape[:2], *other.shape[:2])
    scores = torch.linalg.vector_norm(torch.linalg.vector_norm(blocks, dim=3).double(), dim=1)
    if rough:
        for later, earlier in (scores < _SURE).nonzero().tolist():
            scores[later, earlier] = torch.linalg.matrix_norm(reader.exact[later] @ writer.exact[earlier].mT)
    return scores.mT.contiguous()


def _chance(weights: AttentionWeights, width: int) -> float:
    """Return (1/width)^{1/2}, with one dimension less if both what is written and what reads it have no mean."""
    centred = (
        weights.stored_basis == "folded_centred" and weights.norm is not None and weights.norm.kind == "layer_norm"
    )
    return (width - centred) ** -0.5


def _demand_one_width(readers: dict[str, _Side], writer: _Side, weights: AttentionWeights, earlier: int) -> None:
    for reader in readers.values():
        if reader.exact.shape[-1] != writer.exact.shape[-1]:
            raise QkovError(
                f"{weights.label} reads a stream of width {reader.exact.shape[-1]}, but layer {earlier} writes one of "
                f"width {writer.exact.shape[-1]}, so they cannot compose"
            )
