"""Quantised weights: those whose values their file determines exactly are dequantised, and all others are refused."""

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import QkovError
from .tensor_file import TensorFile

#: Scales of activations, which do not belong to the weight.
_OF_ACTIVATIONS = re.compile(
    r"(^|[._])(input|output|act|activation|k|v|q|prob)_?(scale|zero_point|amax)|scale_(in|out)put"
)
#: Names by which a form is known whose weights are packed or composed, with what to do about it.
_OTHER_FORMS = {
    r"\.qweight": (
        "integers that GPTQ or AWQ packed (qweight)",
        "dequantise the model with the library that packed it",
    ),
    r"\.weight_packed": ("integers that compressed-tensors packed", "decompress the model with that library"),
    r"\.weight\.(absmax|quant_map|quant_state\..+|nested_.+)": (
        "4-bit numbers of bitsandbytes",
        "load it with transformers, call dequantize() on the model, and save it",
    ),
    r"\.W_q": ("integers of HQQ", "dequantise its layers with HQQ (layer.dequantize())"),
    r"\.weight\._(data|scale)": ("integers of quanto", "dequantise the model with quanto"),
    r"\.(weight_[gv]|parametrizations\.weight\.original\d?)": (
        "the parts of a parametrised weight (such as weight_norm), and not the weight",
        "call torch.nn.utils.parametrize.remove_parametrizations on its modules, and save it",
    ),
}


def read_weights(file: TensorFile, names: Sequence[str]) -> dict[str, Tensor]:
    """Return tensors by name; quantised ones with the values that they stand for, in float64.

    Float8 weights, and weights of 8-bit integers, are multiplied by the scale beside them. It is one number for the
    tensor, one for each row, or one for each block of a size that the config states. The products are exact.

    Args:
        file: The file that holds the tensors.
        names: Names of the tensors.

    Raises:
        QkovError: A tensor cannot be read, or is quantised in another way.
    """
    read = file.read(names)
    marked = _mark(file)
    for name, tensor in read.items():
        if is_quantised(tensor):
            read[name] = _dequantised(file, name, tensor, marked)
        elif tensor.is_floating_point() and (scales := [each for each in _scale_names(name) if each in file.shapes]):
            raise QkovError(
                f"{name} of {file.address} has scales beside it ({min(scales)}) but holds {_type(tensor)}, so it is "
                f"not known whether the scales are in it; save the model dequantised, without scales"
            )
    return read


def is_quantised(tensor: Tensor) -> bool:
    """Return whether a tensor has a type of quantised weights: integers, or floating-point numbers of 8 bits."""
    return not tensor.is_floating_point() or tensor.element_size() < 2


def other_form(names: Collection[str], under: str = "") -> str | None:
    """Return in words the form in which a file holds weights that it does not hold as they are, and what to do.

    Args:
        names: Names of the tensors.
        under: What the names of the weights contain; all names are searched if it is empty.
    """
    for pattern, (form, advice) in _OTHER_FORMS.items():
        end = re.compile(pattern + "$")
        found = min((name for name in names if under in name and end.search(name)), default=None)
        if found is not None:
            return f"it holds {form}, such as {found}; {advice}"
    return None


def _dequantised(file: TensorFile, name: str, tensor: Tensor, marked: str | None) -> Float[Tensor, "..."]:
    beside = _beside(name, file.shapes)
    others = sorted(beside - _scale_names(name) - _bitsandbytes(name))
    scales = sorted(beside & _scale_names(name))
    if tensor.is_floating_point() and not beside and marked is None:
        return tensor
    if others:
        raise _refused(file, name, tensor, f"and {others[0]} beside it has no meaning that is documented")
    if not tensor.is_floating_point() and tensor.dtype is not torch.int8:
        raise _refused(file, name, tensor, "in which several numbers may be packed")
    if len(scales) == 1 and not beside & _bitsandbytes(name):
        return _times_scale(file, name, tensor, scales[0])
    if not scales and tensor.dtype is torch.int8 and beside & _bitsandbytes(name):
        return _of_bitsandbytes(file, name, tensor)
    what = "and no scale is beside it" if not scales else f"and several scales are beside it, {', '.join(scales)}"
    raise _refused(file, name, tensor, what + ("" if marked is None else f" ({marked})"))


def _times_scale(file: TensorFile, name: str, tensor: Tensor, of_scale: str) -> Tensor:
    scale = file.read([of_scale])[of_scale]
    if not scale.is_floating_point():
        raise _refused(
            file, name, tensor, f"and {of_scale} holds {_type(scale)}, where floating-point numbers are read"
        )
    rows, values = tensor.shape[0], tensor.double()
    scale, shape = scale.double(), tuple(scale.shape)
    if scale.numel() == 1:
        return values * scale.reshape(())
    if tensor.ndim == 2 and shape in ((rows,), (rows, 1)):
        return values * scale.reshape(rows, 1)
    block = _block_size(file)
    if block is None:
        raise _refused(
            file, name, tensor, f"and {of_scale} has shape {shape}, and no weight_block_size in a config says to what"
        )
    blocks = tuple(math.ceil(size / side) for size, side in zip(tensor.shape, block, strict=False))
    if tensor.ndim != len(block) or shape != blocks:
        sides = " x ".join(map(str, block))
        raise _refused(file, name, tensor, f"and {of_scale} has shape {shape}, where blocks of {sides} need {blocks}")
    for dimension, (side, size) in enumerate(zip(block, tensor.shape, strict=True)):
        scale = scale.repeat_interleave(side, dim=dimension).narrow(dimension, 0, size)
    return values * scale


def _of_bitsandbytes(file: TensorFile, name: str, tensor: Tensor) -> Tensor:
    """Return q * SCB / 127, where SCB is the largest absolute value of each row."""
    of_rows = f"{name.rpartition('.')[0]}.SCB"
    of_format = f"{name.rpartition('.')[0]}.weight_format"
    read = file.read([each for each in (of_rows, of_format) if each in file.shapes])
    largest = read.get(of_rows, tensor.new_empty(0)).double()
    is_by_row = of_format not in read or not bool(read[of_format].any())
    if not is_by_row or tuple(largest.shape) != tuple(tensor.shape[:1]):
        raise _refused(file, name, tensor, "in a format of bitsandbytes whose rows are not in order")
    return tensor.double() * largest[:, None] / 127


def _beside(name: str, names: Collection[str]) -> set[str]:
    """Return the names of the tensors that belong to a weight's module, without biases and scales of activations."""
    module = name.rpartition(".")[0] if name.endswith(".weight") else name
    pattern = re.compile(re.escape(module) + r"(?![A-Za-z0-9])|" + re.escape(name))
    beside = {other for other in names if module in other and other != name and pattern.search(other)}
    return {other for other in beside if not re.search(r"bias$", other) and not _OF_ACTIVATIONS.search(other)}


def _scale_names(name: str) -> set[str]:
    """Return the names under which a weight's scale is documented: of vLLM, compressed-tensors, DeepSeek, ComfyUI."""
    module, dot, stem = name.rpartition(".")
    return {f"{name}_scale", f"{name}_scale_inv", f"{module}{dot}scale_{stem}"}


def _bitsandbytes(name: str) -> set[str]:
    module = name.rpartition(".")[0]
    return {f"{module}.SCB", f"{module}.weight_format"}


def _quantisation(file: TensorFile) -> dict[str, Any]:
    config = file.config or {}
    stated = config.get("quantization_config") or config.get("compression_config")
    return stated if isinstance(stated, dict) else {}


def _mark(file: TensorFile) -> str | None:
    """Return in words what says that the file is quantised, or None."""
    if _quantisation(file):
        return f"{file.config_origin} has a quantization_config"
    if any(name.rpartition(".")[2] == "scaled_fp8" for name in file.shapes):
        return "the file has the mark scaled_fp8"
    key = next((key for key in file.metadata if "quant" in key.lower()), None)
    return None if key is None else f"the file's metadata has {key}"


def _block_size(file: TensorFile) -> tuple[int, ...] | None:
    size: Any = _quantisation(file).get("weight_block_size")
    if not isinstance(size, list) or not size or any(type(side) is not int or side < 1 for side in size):
        return None
    return tuple(size)


def _refused(file: TensorFile, name: str, tensor: Tensor, why: str) -> QkovError:
    return QkovError(
        f"{name} of {file.address} is quantised: it holds {_type(tensor)}, {why}; dequantise the model with the "
        f"library that quantised it, save it (in bfloat16, say), and read that"
    )


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.") + " numbers"
