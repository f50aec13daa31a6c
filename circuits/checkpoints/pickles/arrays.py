"""numpy's arrays, scalars and types, as a pickle describes them."""

from typing import Any

import numpy as np
import torch

from .placeholders import DamagedError, Named
from .stored import StoredBytes, StoredTensor, whole_numbers

#: torch's type for each of numpy's, by kind and number of bytes.
_TYPES = {
    "b1": torch.bool,
    **{f"i{size}": getattr(torch, f"int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"u{size}": getattr(torch, f"uint{8 * size}") for size in (1, 2, 4, 8)},
    **{f"f{size}": getattr(torch, f"float{8 * size}") for size in (2, 4, 8)},
    **{f"c{size}": getattr(torch, f"complex{8 * size}") for size in (8, 16)},
}
#: Types by the names that a pickle may use in place of a code, among them those of ml_dtypes.
_NAMED = {
    **{f"numpy.{name}": code for name, code in (("float16", "f2"), ("float32", "f4"), ("float64", "f8"))},
    **{f"numpy.int{8 * size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{f"numpy.uint{8 * size}": f"u{size}" for size in (1, 2, 4, 8)},
    "numpy.bool_": "b1",
}
_ML_DTYPES = {
    "ml_dtypes.bfloat16": torch.bfloat16,
    "ml_dtypes.float8_e4m3fn": torch.float8_e4m3fn,
    "ml_dtypes.float8_e5m2": torch.float8_e5m2,
}
#: What stands in front of a code: the order of the bytes, or that there is none.
_ORDERS = "<>|="


class PickledType:
    """A type of numbers; it is complete once its state is set.

    Attributes:
        name: The code or name of the type, without the order of its bytes.
        swapped: Whether the bytes of each number are in the order that this machine does not use.
    """

    __slots__ = ("name", "swapped")

    def __init__(self, code: Any) -> None:
        """Take the code that numpy.dtype would be called with."""
        if isinstance(code, PickledType):
            self.name, self.swapped = code.name, code.swapped
            return
        name = code.name if isinstance(code, Named) else code
        if not isinstance(name, str):
            raise DamagedError("a type of numpy has no name")
        self.swapped = name.startswith(">")
        self.name = name[1:] if name[:1] in _ORDERS else _NAMED.get(name, name)

    def set_state(self, state: Any) -> None:
        """Take the order of the bytes; a type with parts of its own is named so."""
        if not isinstance(state, tuple) or len(state) < 5:
            raise DamagedError("a type of numpy has no state")
        self.swapped = state[1] == ">"
        if state[2] is not None or state[3] is not None:
            self.name = "a record"

    @property
    def in_torch(self) -> torch.dtype | None:
        """The same type in torch, or None if there is none."""
        return _TYPES.get(self.name) or _ML_DTYPES.get(self.name)


class PickledArray:
    """An array; it is complete once its state is set.

    Attributes:
        stored: The array as a tensor, or None if it cannot be one.
        kind: What the array consists of, for messages.
    """

    __slots__ = ("kind", "stored")

    def __init__(self) -> None:
        """Begin without content."""
        self.stored: StoredTensor | None = None
        self.kind = "nothing"

    def set_state(self, state: Any) -> None:
        """Take the shape, the type and the bytes."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise DamagedError("an array of numpy has no state")
        shape, kind, is_fortran, content = state[-4:]
        self.fill(content, kind, shape, bool(is_fortran))

    def fill(self, content: Any, kind: Any, shape: Any, is_fortran: bool) -> None:
        """Take the bytes of the array.

        Args:
            content: The bytes; a list where the array holds objects.
            kind: The type of its numbers.
            shape: The shape.
            is_fortran: Whether the first dimension varies fastest.
        """
        if not isinstance(kind, PickledType):
            raise DamagedError("an array of numpy has no type")
        if isinstance(content, str):  # as Python 2 wrote bytes
            content = content.encode("latin1")
        self.kind = "Python objects" if kind.name.startswith("O") else f"the type {kind.name}"
        if kind.in_torch is not None and isinstance(content, (bytes, bytearray)):
            held = np.frombuffer(content, dtype=np.uint8)
            self.stored = array_tensor(held, kind.in_torch, whole_numbers(shape), is_fortran, kind.swapped)


def array_tensor(
    content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], is_fortran: bool, swapped: bool
) -> StoredTensor:
    """Return an array without gaps as a stored tensor.

    Args:
        content: Its bytes.
        dtype: The type of its numbers.
        shape: Its shape.
        is_fortran: Whether the first dimension varies fastest.
        swapped: Whether the bytes of each number are in the other order.
    """
    strides, step = [], 1
    for length in shape if is_fortran else reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    stride = tuple(strides if is_fortran else reversed(strides))
    return StoredTensor(StoredBytes(content, None, 0), dtype, 0, shape, stride, swapped)
