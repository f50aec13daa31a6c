"""In which basis and at which rotary offset circuits are measured, and along which directions."""

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
    """A checkpoint of the run, opened, or the layers of a model at a step of its training."""

    checkpoint: Checkpoint
    weights: AttentionSource


@dataclass(frozen=True)
class TaskDirections:
    """A direction for each circuit, the same for every layer and head, such as C_QK and C_OV of a task."""

    name: str
    circuits: dict[str, Circuit]

    def fingerprint(self) -> str:
        """Return a hash of the directions."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=16)
        for name, circuit in sorted(self.circuits.items()):
            digest.update(name.encode())
            digest.update(circuit.dense().double().contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class View:
    """In which basis and at which rotary offset circuits are looked at."""

    basis: Basis = "raw"
    rotary_offset: int = 0

    @classmethod
    def of(cls, basis: str, rotary_offset: int) -> "View":
        """Return the view with that basis.

        Raises:
            CallError: there is no such basis, or the offset is no whole number.
        """
        if not isinstance(rotary_offset, Integral):
            raise CallError(f"the rotary offset should be a whole number of positions, got {rotary_offset!r}")
        for known in BASES:
            if known == basis:
                return cls(known, rotary_offset)
        raise CallError(f"basis should be one of {', '.join(BASES)}, got {basis!r}")

    def layers(self, opened: AttentionSource) -> Iterator[AttentionWeights]:
        """Yield the layers of a checkpoint in the basis."""
        for weights in opened.layers():
            yield weights.in_basis(self.basis)

    def offset(self, weights: AttentionWeights) -> int:
        """Return the offset for a layer: 0 where its positions are not rotary, as its W_QK is the same at each."""
        return 0 if weights.facts.rotary is None else self.rotary_offset

    def circuits(self, weights: AttentionWeights) -> dict[str, Circuit]:
        """Return the circuits of a layer that is in the basis."""
        return weights.circuits(self.basis, self.offset(weights))

    def demand_possible(self, opened: AttentionSource, address: str) -> None:
        """Refuse a basis or an offset that the checkpoint does not have, at the first layers that tell.

        Raises:
            CallError: the norms are not known, no layer has rotary positions, or their frequencies are not known.
        """
        for weights in self.layers(opened):
            if self.circuits(weights) and (not self.rotary_offset or weights.facts.rotary is not None):
                return
        if self.rotary_offset:
            raise CallError(
                f"{address} has no layer with rotary positions, so W_QK is the same at every offset: "
                f"leave the rotary offset {self.rotary_offset} out"
            )
