"""The basis and the rotary offset in which circuits are measured, and the directions with which they are compared."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral

from ...circuits.algebra.circuit import Circuit
from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.errors import CallError
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.norms import BASES, Basis
from ...circuits.weights.source import AttentionSource


@dataclass(frozen=True)
class Opened:
    """An open checkpoint of a run, or the layers of a model at a step of its training.

    Attributes:
        checkpoint: The checkpoint, with its step and its name.
        weights: The source of its layers.
        stated_step: The step that the checkpoint's own files state, in the unit of the run; None if they state none.
    """

    checkpoint: Checkpoint
    weights: AttentionSource
    stated_step: int | None = None


@dataclass(frozen=True)
class TaskDirections:
    """A direction for each circuit, the same for every layer and head, such as C_QK and C_OV of a task.

    Attributes:
        name: The name by which the rows of a store refer to the directions.
        circuits: The directions by circuit, QK and OV, each of shape [d_model, d_model].
    """

    name: str
    circuits: dict[str, Circuit]

    def fingerprint(self) -> str:
        """Return a hash of the name and the directions."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=16)
        for name, circuit in sorted(self.circuits.items()):
            digest.update(name.encode())
            digest.update(circuit.dense().double().contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class View:
    """The basis and the rotary offset in which circuits are measured.

    Attributes:
        basis: raw, folded or folded_centred.
        rotary_offset: Query position minus key position, for W_QK of layers with rotary positions.
    """

    basis: Basis = "raw"
    rotary_offset: int = 0

    @classmethod
    def of(cls, basis: str, rotary_offset: int) -> "View":
        """Return the view with a basis and an offset.

        Args:
            basis: raw, folded or folded_centred.
            rotary_offset: Query position minus key position.

        Raises:
            CallError: There is no such basis, or the offset is not a whole number.
        """
        if not isinstance(rotary_offset, Integral):
            raise CallError(f"the rotary offset should be a whole number of positions, got {rotary_offset!r}")
        for known in BASES:
            if known == basis:
                return cls(known, rotary_offset)
        raise CallError(f"basis should be one of {', '.join(BASES)}, got {basis!r}")

    def layers(self, opened: AttentionSource) -> Iterator[AttentionWeights]:
        """Yield the layers of a source in the basis.

        Raises:
            CallError: A layer cannot be had in the basis; the message names the source.
        """
        for weights in opened.layers():
            try:
                in_basis = weights.in_basis(self.basis)
            except CallError as error:
                raise CallError(f"{opened.address}: {error}") from error
            yield in_basis

    def offset(self, weights: AttentionWeights) -> int:
        """Return the offset for a layer: 0 without rotary positions, since W_QK is then the same at every offset."""
        return 0 if weights.facts.rotary is None else self.rotary_offset

    def circuits(self, weights: AttentionWeights) -> dict[str, Circuit]:
        """Return the circuits of a layer that is in the basis already."""
        return weights.circuits(self.basis, self.offset(weights))

    def head_identity(self, weights: AttentionWeights, circuit: str, head: int) -> dict[str, str | int | None]:
        """Return the columns that state which circuit of which head a row measures, and how.

        Args:
            weights: The layer.
            circuit: QK or OV.
            head: The number of the head.
        """
        rotary = circuit == "QK" and weights.facts.rotary is not None
        return {
            "stack": weights.stack,
            "layer": weights.layer,
            "head": head,
            "key_value_head": head // weights.group_size,
            "circuit": circuit,
            "basis": self.basis,
            "rotary_offset": self.rotary_offset if rotary else None,
        }

    def demand_possible(self, opened: AttentionSource, address: str) -> None:
        """Refuse a basis or an offset that a source does not have; only as many layers are read as decide this.

        Args:
            opened: The source of the layers.
            address: The address of the source, for the message.

        Raises:
            CallError: The norms are not known, no layer has rotary positions, or their frequencies are not known.
        """
        for weights in self.layers(opened):
            if self.circuits(weights) and (not self.rotary_offset or weights.facts.rotary is not None):
                return
        if self.rotary_offset:
            raise CallError(
                f"{address} has no layer with rotary positions, so W_QK is the same at every offset: "
                f"leave out the rotary offset {self.rotary_offset}"
            )
