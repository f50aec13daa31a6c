"""Gram matrices W'W of tall factors in float64, each converted once, in memory that stays in cache."""

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

# Taking the mean away from W'W instead of from W is exact as long as the means do not make up most of W.
_LARGEST_SHARE_OF_MEANS = 0.5


@dataclass(frozen=True, eq=False)
class Folded:
    """A tall factor behind a norm, diag(gain) W less its mean over the rows, which is formed only when asked for.

    Attributes:
        tall: W, [*batch, long, rank].
        gain: of each row; None for one.
        centred: whether the mean over the rows is taken away.
    """

    tall: Tensor
    gain: Tensor | None
    centred: bool

    @property
    def shape(self) -> torch.Size:
        """Of W."""
        return self.tall.shape

    def __getitem__(self, index: slice | Tensor) -> "Folded":
        """Return some of the batch."""
        return Folded(self.tall[index], self.gain, self.centred)

    def repeated(self, times: int) -> "Folded":
        """Return each matrix of the batch several times in a row."""
        return Folded(self.tall.repeat_interleave(times, dim=0), self.gain, self.centred)

    @cached_property
    def dense(self) -> Float64[Tensor, "*batch long rank"]:
        """The factor itself."""
        tall = at_home(self.tall)
        # In place: folding is bound by memory.
        dense = tall.to(torch.float64, copy=True)
        if self.gain is not None:
            dense.mul_(upcast(self.gain)[:, None])
        return dense.sub_(dense.mean(dim=-2, keepdim=True)) if self.centred else dense


def dense(tall: Tensor | Folded) -> Float[Tensor, "*batch long rank"]:
    """The factor as a tensor."""
    return tall.dense if isinstance(tall, Folded) else tall


def gram(tall: Float[Tensor, "*batch long rank"] | Folded) -> Float64[Tensor, "*batch rank rank"]:
    """W'W of each matrix of the batch, several side by side in threads."""
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
    found = torch.from_numpy(products)
    if folded.centred:
        _centre(found, torch.from_numpy(sums), folded)
    return found.reshape(*batch, rank, rank)


class _Blocks:
    """A batch of tall matrices times a gain, a block at a time in float64, in scratch that stays in cache."""

    def __init__(self, matrices: Tensor, gain: Tensor | None) -> None:
        # Scratch whose matrices lie as these do is filled at the speed of memory.
        self.transposed = matrices.stride(-1) > matrices.stride(-2)
        self.matrices = matrices.mT if self.transposed else matrices
        self.gain = None if gain is None else upcast(gain).cpu()[None if self.transposed else (slice(None), None)]
        self.step = max(1, SCRATCH_ELEMENTS // math.prod(matrices.shape[-2:]))

    def between(self, first: int, last: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the blocks of some of the matrices, each transposed, and which they are."""
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
    """Room in float64, one matrix after the other: each thread's own, kept, since new memory is slow to touch first."""
    size = matrices.numel()
    if size > SCRATCH_ELEMENTS:
        return torch.empty(matrices.shape, dtype=torch.float64)
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = np.empty(SCRATCH_ELEMENTS)
    # Of numpy, since a tensor made in inference mode could not be written to outside of it.
    return torch.from_numpy(_of_thread.scratch[:size]).view(matrices.shape)


_of_thread = threading.local()


def _centre(products: Tensor, sums: Tensor, folded: Folded) -> None:
    """Take the means over the rows away from the products of what was summed."""
    rows = folded.shape[-2]
    of_means, size = sums.square().sum(dim=-1) / rows, products.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    products.addcmul_(sums[:, :, None], sums[:, None, :], value=-1 / rows)
    rest = of_means > _LARGEST_SHARE_OF_MEANS * size
    if rest.any():
        centred = folded.dense.flatten(0, -3)[rest]
        products[rest] = centred.mT @ centred
