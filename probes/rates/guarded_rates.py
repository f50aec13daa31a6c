"""The entries whose steps a guard lowers, on top of their multipliers."""

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Dictionary

from ...circuits.weights.layer_keys import LayerKey
from .entries import CircuitEntries
from .multipliers import HeadMultipliers
from .scaled_entries import ScaledEntries


class GuardedRates:
    """The entries of W_Q, W_K, b_Q and b_K, each with its own multiplier and that of the guard.

    Attributes:
        biases: The entries of those biases that have no multiplier but that of the guard.
        parts: All entries of the QK circuit.
    """

    def __init__(
        self, scaled: Iterable[ScaledEntries], of_heads: HeadMultipliers, entries: Iterable[CircuitEntries]
    ) -> None:
        """Take the entries that have multipliers, and find the biases that have none.

        Args:
            scaled: The entries that have multipliers.
            of_heads: Their multipliers, which are changed by the guard.
            entries: The entries of the QK circuit, with all biases.
        """
        own = [part for part in scaled if part.entries.circuit == "QK"]
        names = {part.entries.name for part in own}
        others = [part for part in entries if part.name not in names]
        of_biases = HeadMultipliers(others, 1.0, 1.0)
        self.biases = [ScaledEntries(part, of_biases) for part in others]
        self.parts = [*own, *self.biases]
        self._groups = [
            (multipliers, {layer: list(heads) for layer, heads in multipliers.heads("QK").items()}, parts)
            for multipliers, parts in ((of_heads, own), (of_biases, self.biases))
        ]

    def lower(self, rates: Dictionary[LayerKey, Sequence[float]]) -> None:
        """Take the next steps of each head at a multiple of its own rate.

        Args:
            rates: The multiples of all heads, by layer.
        """
        for multipliers, base, parts in self._groups:
            changed = set()
            for layer, heads in base.items():
                wanted = [own * rate for own, rate in zip(heads, rates.get(layer, ()), strict=False)]
                if wanted and wanted != multipliers.heads("QK")[layer]:
                    changed.add(layer)
                    for head, multiplier in enumerate(wanted):
                        multipliers.set("QK", layer, head, multiplier)
            for part in parts:
                if any(block.layer in changed for block in part.entries.blocks):
                    part.refresh(multipliers)
