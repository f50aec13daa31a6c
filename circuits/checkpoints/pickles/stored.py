"""Tensors whose values are still in the bytes of a file: what is claimed is checked before anything is built."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import QkovError, named_input
from ..tensor_file import in_memory
from .placeholders import ALLOWANCE, DamagedError

#: How many times the bytes of a file a sparse tensor may have once it is filled with zeros.
_FILLED = 100
#: No dimension of a tensor is larger, nor is the product of those of an empty one.
_LARGEST = 2**31


class Readable(ABC):
    """A tensor that can be read when it is requested.

    Attributes:
        shape: The shape of the tensor.
    """

    shape: tuple[int, ...]

    @abstractmethod
    def demand_bounded(self, size: int) -> None:
        """Raise DamagedError if the tensor claims more than a file of this many bytes can hold."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return the tensor in memory of its own; `name` is for messages."""


class StoredBytes:
    """A storage of a pickle: bytes that tensors share.

    Attributes:
        content: The bytes, or None until their place in the file is known.
        dtype: The type of the elements, or None if the tensors say it.
        length: The number of elements that the pickle claims; of bytes if there is no dtype.
    """

    __slots__ = ("content", "dtype", "length")

    def __init__(self, content: np.ndarray | None, dtype: torch.dtype | None, length: int) -> None:
        """Store what the pickle says."""
        self.content, self.dtype, self.length = content, dtype, length

    @property
    def bytes_claimed(self) -> int:
        """How many bytes the storage has, according to the pickle."""
        return self.length * (1 if self.dtype is None else self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class StoredTensor(Readable):
    """A tensor over a storage.

    Attributes:
        storage: The bytes, or None for a tensor that was saved without its values.
        dtype: The type of the elements.
        offset: The first element, counted from the beginning of the storage.
        shape: The shape.
        stride: The distance in elements between neighbours along each dimension.
        swapped: Whether the bytes of each number are in the other order.
        conjugate: Whether the values are the conjugates of those stored.
        negative: Whether the values are the negatives of those stored.
    """

    storage: StoredBytes | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    swapped: bool = False
    conjugate: bool = False
    negative: bool = False

    @property
    def extent(self) -> int:
        """The number of elements from the first to the last in the storage."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def demand_bounded(self, size: int) -> None:
        """Refuse a tensor that lies outside its storage, or has more bytes than a file of this size."""
        demand_sizes(self.shape, 8 * self.dtype.itemsize, max(size, ALLOWANCE))
        if self.storage is None:
            return
        content = self.storage.content
        if content is None:
            raise DamagedError("the values of a tensor are missing")
        if content.size < self.storage.bytes_claimed:
            raise DamagedError(f"a storage of {self.storage.bytes_claimed} bytes has {content.size} in the file")
        stop = (self.offset + self.extent) * self.dtype.itemsize
        if self.extent and stop > content.size:
            raise DamagedError(
                f"a tensor of shape {list(self.shape)} ends at byte {stop} of {content.size} that are stored"
            )

    def read(self, name: str) -> Tensor:
        """Return the tensor in memory of its own."""
        if self.storage is None or self.storage.content is None:
            raise QkovError(
                f"{name} has no values in memory (device meta): it was saved without them; save the model again "
                f"after its weights were loaded"
            )
        if not self.extent:
            return torch.empty(self.shape, dtype=self.dtype)
        start, item = self.offset * self.dtype.itemsize, self.dtype.itemsize
        # The copy begins where any type of number may; what is mapped from a file need not.
        content = self.storage.content[start : start + self.extent * item].copy()
        if self.swapped:
            part = item // 2 if self.dtype.is_complex else item
            content = content.view(f"u{part}").byteswap().view(np.uint8)
        tensor = torch.from_numpy(content).view(self.dtype).as_strided(self.shape, self.stride)
        tensor = tensor.contiguous() if tensor.numel() > self.extent else tensor
        tensor = tensor.conj().resolve_conj() if self.conjugate else tensor
        return -tensor if self.negative else tensor


@dataclass(frozen=True, eq=False)
class StoredSparse(Readable):
    """A sparse tensor, which is filled with zeros when it is read.

    Attributes:
        layout: The name of the layout, such as "sparse_coo".
        indices: Its tensors of indices: one for sparse_coo, two for the others.
        values: The values that are not zero.
        shape: The shape.
    """

    layout: str
    indices: tuple[StoredTensor, ...]
    values: StoredTensor
    shape: tuple[int, ...]

    def demand_bounded(self, size: int) -> None:
        """Refuse parts that are not in the file, and a filled tensor that would be too large for it."""
        for part in (*self.indices, self.values):
            part.demand_bounded(size)
        demand_sizes(self.shape, 8 * self.values.dtype.itemsize, max(_FILLED * size, ALLOWANCE))

    def read(self, name: str) -> Tensor:
        """Return the tensor with its zeros."""
        indices, values = [part.read(name) for part in self.indices], self.values.read(name)
        with named_input(name, "a sparse tensor"), warnings.catch_warnings():
            # torch warns that some of its layouts are new.
            warnings.simplefilter("ignore")
            if self.layout == "sparse_coo":
                return torch.sparse_coo_tensor(indices[0], values, self.shape, check_invariants=True).to_dense()
            compressed, plain = indices
            layout = getattr(torch, self.layout)
            return torch.sparse_compressed_tensor(
                compressed, plain, values, self.shape, layout=layout, check_invariants=True
            ).to_dense()


class HeldTensor(Readable):
    """A tensor that is in memory already, or mapped there by torch."""

    def __init__(self, tensor: Tensor) -> None:
        """Hold the tensor."""
        self._tensor, self.shape = tensor, tuple(tensor.shape)

    def demand_bounded(self, size: int) -> None:
        """Accept the tensor: torch built it."""

    def read(self, name: str) -> Tensor:
        """Return a copy; a sparse tensor is filled with zeros."""
        tensor = in_memory(self._tensor, name)
        return tensor.clone() if tensor.layout is torch.strided else tensor.to_dense()


def demand_sizes(shape: Sequence[int], bits: int, size: int) -> None:
    """Refuse a shape whose numbers cannot all be in a file.

    Args:
        shape: The shape.
        bits: The number of bits of each element.
        size: The number of bytes of the file.

    Raises:
        DamagedError: A dimension is negative, or the elements take more bytes than the file has.
    """
    if any(not 0 <= length < _LARGEST for length in shape):
        raise DamagedError(f"a tensor has shape {_shown(shape)}")
    # What is empty takes no bytes, but must not count as large anywhere else.
    if prod(shape) * bits > 8 * size or (0 in shape and prod(length for length in shape if length) >= _LARGEST):
        raise DamagedError(f"a tensor of shape {_shown(shape)} would be larger than the whole file")


def _shown(shape: Sequence[int]) -> str:
    return f"[{', '.join(str(n) if abs(n) < 10**20 else 'a huge number' for n in shape[:8])}]"


def whole_numbers(sizes: Any) -> tuple[int, ...]:
    """Return sizes or strides from a pickle.

    Raises:
        DamagedError: They are not whole numbers from zero on.
    """
    if not isinstance(sizes, (tuple, list)) or len(sizes) > 64 or any(type(n) is not int or n < 0 for n in sizes):
        raise DamagedError("the shape of a tensor is not a list of whole numbers")
    return tuple(sizes)
