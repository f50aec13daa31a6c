"""Gram matrices W'W of tall factors in float64; each factor is converted once, in memory that stays in cache."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from .blas import multiply_by_transpose
from .products import SCRATCH_ELEMENTS, at_home, upcast
from .threads import in_threads

# Subtracting the mean from W'W instead of from W is accurate as long as the means do not make up most of W.
_LARGEST_SHARE_OF_MEANS = 0.5


@dataclass(frozen=True, eq=False)
class Folded:
    """A tall factor into which a norm is folded: diag(gain) W, minus its mean over the rows if centred.

    The folded factor is formed only on demand.

    Attributes:
        tall: W, [*batch, long, rank].
        gain: The gain of each row, or None for a gain of one.
        centred: Whether the mean over the rows is subtracted.
    """

    tall: Tensor
    gain: Tensor | None
    centred: bool

    @property
    def shape(self) -> torch.Size:
        """The shape of W."""
        return self.tall.shape

    def __getitem__(self, index: slice | Tensor) -> "Folded":
        """Index the batch."""
        return Folded(self.tall[index], self.gain, self.centred)

    def repeated(self, times: int) -> "Folded":
        """Repeat each matrix of the batch several times in a row."""
        return Folded(self.tall.repeat_interleave(times, dim=0), self.gain, self.centred)

    @cached_property
    def dense(self) -> Float64[Tensor, "*batch long rank"]:
        """The folded factor itself, formed."""
        tall = at_home(self.tall)
        # In place, since folding is limited by memory bandwidth.
        dense = tall.to(torch.float64, copy=True)
        if self.gain is not None:
            dense.mul_(upcast(self.gain)[:, None])
        return dense.sub_(dense.mean(dim=-2, keepdim=True)) if self.centred else dense


def dense(tall: Tensor | Folded) -> Float[Tensor, "*batch long rank"]:
    """Return the factor as a tensor."""
    return tall.dense if isinstance(tall, Folded) else tall


def gram(tall: Float[Tensor, "*batch long rank"] | Folded) -> Float64[Tensor, "*batch rank rank"]:
    """Return W'W of each matrix of the batch, computed in several threads."""
    folded = tall if isinstance(tall, Folded) else Folded(tall, None, centred=False)
    matrices = at_home(folded.tall)
    if matrices.device.type != "cpu":
        matrices = folded.dense
        return matrices.mT @ matrices
    batch, (long, rank) = matrices.shape[:-2], matrices.shape[-2:]
    blocks = _Blocks(matrices.reshape(math.prod(batch), long, rank), folded.gain)
    products = np.empty((math.prod(batch), rank, rank))
    sums, ones = np.empty((math.prod(batch), rank)), np.ones(long)

    def fill(first: int, last: int) -> None:
        with np.errstate(all="ignore"):
            for part, block in blocks.between(first, last):
                multiply_by_transpose(block, out=products[part])
                if folded.centred:
                    np.matmul(block, ones, out=sums[part])

    in_threads(fill, len(products))
    grams = torch.from_numpy(products)
    if folded.centred:
        _centre(grams, torch.from_numpy(sums), folded)
    return grams.reshape(*batch, rank, rank)


class _Blocks:
    """A batch of tall matrices times a gain, read as blocks in float64 in scratch memory that stays in cache."""

    def __init__(self, matrices: Tensor, gain: Tensor | None) -> None:
        # Scratch memory with the same layout as the matrices is filled at the speed of memory.
        self.transposed = matrices.stride(-1) > matrices.stride(-2)
        self.matrices = matrices.mT if self.transposed else matrices
        self.gain = None if gain is None else upcast(gain).cpu()[None if self.transposed else (slice(None), None)]
        self.step = max(1, SCRATCH_ELEMENTS // math.prod(matrices.shape[-2:]))

    def between(self, first: int, last: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of the matrices from `first` to `last`, transposed, each with its slice of the batch."""
        as_stored = self.matrices.dtype == torch.float64 and self.gain is None
        scratch = None if as_stored else _scratch_like(self.matrices[: self.step])
        for start in range(first, last, self.step):
            block = self.matrices[start : min(start + self.step, last)]
            if scratch is not None:
                block = scratch[: len(block)].copy_(block)
            if self.gain is not None:
                block.mul_(self.gain)
            yield slice(start, start + len(block)), (block if self.transposed else block.mT).numpy()


def _scratch_like(matrices: Tensor) -> Float64[Tensor, "batch rows columns"]:
    """Return float64 memory of this shape, kept for each thread because the first access to new memory is slow."""
    size = matrices.numel()
    if size > SCRATCH_ELEMENTS:
        return torch.empty(matrices.shape, dtype=torch.float64)
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = np.empty(SCRATCH_ELEMENTS)
    # A numpy array, since a tensor made in inference mode cannot be written to outside of it.
    return torch.from_numpy(_of_thread.scratch[:size]).view(matrices.shape)


_of_thread = threading.local()


def _centre(products: Tensor, sums: Tensor, folded: Folded) -> None:
    """Correct W'W in place for the means over the rows of W, which were not subtracted."""
    rows = folded.shape[-2]
    of_means, size = sums.square().sum(dim=-1) / rows, products.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    products.addcmul_(sums[:, :, None], sums[:, None, :], value=-1 / rows)
    rest = of_means > _LARGEST_SHARE_OF_MEANS * size
    if rest.any():
        centred = folded.dense.flatten(0, -3)[rest]
        products[rest] = centred.mT @ centred
