"""Open a checkpoint and read its attention weights, one layer at a time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..algebra.threads import side_by_side
from ..architectures.layouts import arrange_layer, count_heads
from ..architectures.mapping import Mapping, Names
from ..architectures.recognition import Recognised
from ..checkpoints.tensor_file import TensorFile, demand_unscaled
from ..errors import CallError, QkovError
from ..weights.attention_weights import AttentionWeights
from ..weights.norms import Basis, Norm, is_centred
from ..weights.rotary import Rotary
from .ahead import read_ahead
from .saved_format import is_own, own_scalars

Result = TypeVar("Result")


class OpenCheckpoint:
    """A checkpoint whose tensors are known by name and are read layer by layer.

    Attributes:
        file: where the tensors are.
        recognised: how they were, in words.
        stacks: the mapping of each stack of layers.
        skipped: what is no attention that has these circuits, and why.
    """

    def __init__(self, file: TensorFile, recognised: Recognised) -> None:
        """Find the layers.

        Raises:
            QkovError: the file does not hold the tensors that a mapping names, or holds them quantised.
        """
        self.file = file
        self.recognised = recognised.how
        self.stacks = recognised.stacks
        self.skipped = recognised.skipped | ({} if file.partial is None else {"other files": file.partial})
        self._names = [
            (mapping, layer, names)
            for mapping in recognised.stacks
            for layer, names in mapping.layers(file.shapes).items()
        ]
        wanted = [name for *_, names in self._names for of_role in names.values() for name in of_role]
        demand_unscaled(wanted, file.shapes, file.address)

    @property
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""
        return [(mapping.stack, layer) for mapping, layer, _ in self._names]

    def tensors(self, mapping: Mapping) -> dict[str, str]:
        """Return by role the tensors of a stack that are there, with {layer} for the layer's number."""
        roles = {role for stack, _, names in self._names if stack is mapping for role in names}
        return {role: mapping.full_name(name) for role, name in mapping.tensors.items() if role in roles}

    @property
    def scalars(self) -> dict[str, float]:
        """Figures saved beside the weights, such as the loss.

        Raises:
            QkovError: the mapping names a scalar that the file does not hold.
        """
        if is_own(self.file):
            return own_scalars(self.file)
        figures = {}
        for mapping in self.stacks:
            for name, key in mapping.scalars.items():
                if key not in self.file.scalars:
                    held = ", ".join(sorted(self.file.scalars)[:12]) or "none"
                    raise QkovError(
                        f"{self.file.address} has no scalar {key}, which {mapping.origin} names; it has {held}"
                    )
                figures[name] = self.file.scalars[key]
        return figures

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield the attention weights of one layer after the other, so that no more than one is in memory.

        Of a file at a distance the next layer is fetched while one is in use.

        Raises:
            QkovError: a tensor's shape does not fit its layout, or two of them do not fit each other.
        """
        readings = (partial(self._layer, *place) for place in self._names)
        yield from read_ahead(readings) if self.file.waits else (reading() for reading in readings)

    def each_layer(self, job: Callable[[AttentionWeights], Result]) -> list[Result]:
        """Return what a job gives for each layer's weights, in order; up to four at a time share torch's threads.

        Faster than the same job in a loop over `layers`: no thread waits for the others within a layer. A job runs in a
        thread of its own, where what is set for the caller's alone is not set, such as autocast.

        Raises:
            QkovError: as `layers`.
        """
        return side_by_side(job, self.layers())

    def _layer(self, mapping: Mapping, layer: int, names: Names) -> AttentionWeights:
        try:
            return _layer(self.file, mapping, layer, names)
        except CallError as error:
            raise QkovError(f"{self.file.address}: {error}") from error


def _layer(file: TensorFile, mapping: Mapping, layer: int, names: Names) -> AttentionWeights:
    tensors = _read(file, names)
    shapes = {role: tuple(tensor.shape) for role, tensor in tensors.items()}
    counts = count_heads(shapes, mapping.layouts, mapping.heads)
    # Heads that do not divide the width have to be in the message.
    told = mapping.heads is not None and counts is None
    origin = f"{mapping.origin} with {mapping.heads} heads" if told else mapping.origin
    weights: dict[str, Any] = arrange_layer(tensors, mapping.layouts, counts, names, origin)
    d_head = weights["W_Q"].shape[-1] if "W_Q" in weights else None
    norms: dict[str, Any] = {
        f"{side}_norm": mapping.facts.head_norm(layer, side, tensors, d_head or 0)
        for side in ("query", "key")
        if f"{side}_norm_gain" in tensors or f"{side}_norm_gain" not in mapping.tensors
    }
    facts = mapping.facts.of_layer(layer, d_head)
    if "rotary_sin" in tensors and "rotary_cos" in tensors:
        rotary = Rotary.of_tables(tensors["rotary_sin"], tensors["rotary_cos"])
        facts = replace(facts, rotary=rotary, positions="rotary")
    norm = mapping.facts.norm(layer, tensors)
    return _folded(AttentionWeights(layer, **weights, **norms, norm=norm, facts=facts, stack=mapping.stack))


def _folded(weights: AttentionWeights) -> AttentionWeights:
    """The weights, in the basis that they are in where the norm in front is not known and the weights tell.

    Folding LayerNorm leaves readers whose mean over the model's width is zero, which training does not.
    """
    read, written = (weights.W_Q, weights.W_K, weights.W_V), weights.W_O
    if "norm" not in weights.facts.unknown or not all(W is not None and _is_centred(W) for W in read):
        return weights
    facts = replace(weights.facts, unknown=weights.facts.unknown - {"norm"})
    basis: Basis = "folded_centred" if written is not None and is_centred(written, dim=-1) else "folded"
    return replace(weights, norm=Norm("layer_norm"), facts=facts, stored_basis=basis)


def _is_centred(W: Tensor) -> bool:
    """Whether the mean over the width of the model is zero in every head; most weights fail at the first."""
    return is_centred(W[:1], dim=-2) and is_centred(W, dim=-2)


def _read(file: TensorFile, names: Names) -> dict[str, Tensor]:
    """The tensors of a layer by role, those of single heads stacked."""
    read = file.read([name for of_role in names.values() for name in of_role])
    return {
        role: read[of_role[0]] if len(of_role) == 1 else torch.stack([read[name] for name in of_role])
        for role, of_role in names.items()
    }
