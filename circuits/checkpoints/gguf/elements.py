"""The numbers of a stored tensor, dequantised as llama.cpp defines its type."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from ...errors import QkovError
from .header import StoredTensor

_FLOAT64, _BFLOAT16 = 28, 30
#: Types that are numbers as they are, by GGUF's numbers for them, the first two of which are float32 and float16.
_FLOATS = {0: "f4", 1: "f2", _FLOAT64: "f8", _BFLOAT16: "u2"}


def elements_of(stored: StoredTensor, content: np.ndarray, order: str, address: str) -> Tensor:
    """Return the numbers of a tensor in memory of their own: float64 as they are, all others as float32.

    Args:
        stored: Where the tensor is.
        content: The bytes of the file.
        order: The order of the bytes of a number, as struct writes it.
        address: The address of the file, for messages.

    Raises:
        QkovError: The type is not known, or is not one of weights.
    """
    if stored.size is None:
        raise QkovError(
            f"{stored.name} of {address} has the type {stored.kind}, which the installed package gguf does not know; "
            f"update it (pip install -U gguf)"
        )
    held = content[stored.begin : stored.begin + stored.size]
    if stored.kind in _FLOATS:
        numbers = held.view(np.dtype(f"{order}{_FLOATS[stored.kind]}"))
        numbers = numbers.astype(numbers.dtype.newbyteorder("="))
        if stored.kind == _BFLOAT16:
            return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16).float().reshape(stored.shape)
        values = torch.from_numpy(numbers)
        return (values if stored.kind == _FLOAT64 else values.float()).reshape(stored.shape)
    return _dequantised(stored, held, order, address)


def _dequantised(stored: StoredTensor, held: np.ndarray, order: str, address: str) -> Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(stored.kind)
    if order == ">":
        raise QkovError(
            f"{stored.name} of {address} is {kind.name} in the byte order of other machines; convert the file with "
            f"gguf-convert-endian"
        )
    rows = prod(stored.shape[:-1])
    try:
        # What is not finite is that of a damaged scale, and shows in the values.
        with np.errstate(all="ignore"):
            values = dequantize(held.reshape(rows, -1) if rows else held, kind)
    except NotImplementedError as error:
        raise QkovError(
            f"{stored.name} of {address} is {kind.name}, which cannot be dequantised; save it as F16"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(stored.shape)
