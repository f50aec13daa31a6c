"""Entries of a parameter whose steps are scaled after they were taken, each head's by its own multiplier."""

import itertools
from typing import Any

import torch
from torch import Tensor

from .entries import CircuitEntries
from .multipliers import HeadMultipliers


class ScaledEntries:
    """The entries of one parameter and circuit, their multipliers, and their values before a step.

    Attributes:
        entries: The entries.
        multipliers: The multiplier of all of them as one number; or, where they differ, as a tensor that broadcasts
            over the parameter.
        before: Their values before the step, or at the last call of `scale` after it.
    """

    def __init__(self, entries: CircuitEntries, multipliers: HeadMultipliers) -> None:
        """Keep the entries.

        Args:
            entries: The entries.
            multipliers: The multiplier of each head.
        """
        self.entries = entries
        self.before: list[Tensor] = []
        self.multipliers: float | Tensor = 1.0
        self.refresh(multipliers)

    @property
    def is_scaled(self) -> bool:
        """Whether any entry has another multiplier than 1."""
        return isinstance(self.multipliers, Tensor) or self.multipliers != 1

    def refresh(self, multipliers: HeadMultipliers) -> None:
        """Take up multipliers that changed; the next step is scaled by them.

        Args:
            multipliers: The multiplier of each head.
        """
        blocks = [(block, multipliers.of(self.entries.circuit, block)) for block in self.entries.blocks]
        different = {multiplier for _, multiplier in blocks}
        if len(different) == 1:
            (self.multipliers,) = different
            return
        shape = self.entries.parameter.shape
        divided = [
            any(sum(map(len, block.slices[axis])) < size for block, _ in blocks) for axis, size in enumerate(shape)
        ]
        # Entries of no block belong to other circuits, and no view holds them.
        grid = torch.full([size if along else 1 for size, along in zip(shape, divided, strict=True)], torch.inf)
        grid = grid.double()
        for block, multiplier in blocks:
            indices = [
                torch.tensor(list(itertools.chain(*ranges))) if along else torch.tensor([0])
                for ranges, along in zip(block.slices, divided, strict=True)
            ]
            at = torch.meshgrid(*indices, indexing="ij")
            # Layers that share weights share the lowest multiplier.
            grid[at] = grid[at].clamp(max=multiplier)
        self.multipliers = grid

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the values before a step."""
        views = self.entries.views()
        if not self.before or (self.before[0].device, self.before[0].dtype) != (views[0].device, views[0].dtype):
            self.before = [torch.empty_like(view, memory_format=torch.contiguous_format) for view in views]
        if isinstance(self.multipliers, Tensor):
            self.multipliers = self.multipliers.to(views[0])
        for kept, view in zip(self.before, views, strict=True):
            kept.copy_(view)

    @torch.no_grad()
    def scale(self) -> None:
        """Multiply what the entries moved since `keep`, or since the last call; the values then count as kept."""
        for kept, view, multipliers in zip(self.before, self.entries.views(), self._of_views(), strict=True):
            if self.is_scaled:
                view.copy_(kept.lerp_(view, multipliers))
            else:
                kept.copy_(view)

    def _of_views(self) -> list[Any]:
        multipliers, entries = self.multipliers, self.entries
        if not isinstance(multipliers, Tensor):
            return [multipliers] * len(entries.ranges)
        multipliers = self.multipliers = multipliers.to(self.before[0])
        if multipliers.shape[entries.dimension] == 1:
            return [multipliers] * len(entries.ranges)
        return [multipliers.narrow(entries.dimension, part.start, len(part)) for part in entries.ranges]
