"""What a pickle may build: plain containers, numpy's arrays and torch's tensors, each by a function of our own.

The table is fixed. A name that is not in it is never looked up anywhere else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .arrays import PickledArray, PickledType
from .placeholders import DamagedError, Named, Placeholder, dictionary
from .stored import StoredBytes, StoredSparse, StoredTensor, whole_numbers


class Machine(ABC):
    """What the functions of the table need of the machine that calls them."""

    @abstractmethod
    def load_nested(self, content: bytes) -> Any:
        """Load bytes that torch.save wrote, within the same bounds."""

    @abstractmethod
    def spend(self, work: int) -> None:
        """Count work whose result takes no bytes of the file.

        Raises:
            DamagedError: It is more than the bytes of the file allow.
        """

    @abstractmethod
    def build(self, called: Named, arguments: tuple[Any, ...], keywords: Any = None) -> Any:
        """Return what the table builds for a name, or else a placeholder."""


#: torch's types of numbers, by the name under which a pickle holds them.
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
#: The types of torch's storages that have one.
STORAGES = {
    f"{module}.{name}Storage": dtype
    for module in ("torch", "torch.cuda")
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
        "QInt8": torch.qint8,
        "QUInt8": torch.quint8,
        "QInt32": torch.qint32,
    }.items()
}
#: Kinds of tensors whose numbers are those of a plain tensor.
_PLAIN_TENSORS = frozenset(
    ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch._C.TensorBase")
)
#: Kinds of arrays whose bytes are those of a plain array.
_PLAIN_ARRAYS = frozenset(("numpy.ndarray", "numpy.matrix", "numpy.memmap"))
_COMPRESSED = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


def _elements(machine: Machine, elements: Iterable[Any] = ()) -> list[Any]:
    if not isinstance(elements, (list, tuple, dict, str, bytes, bytearray)):
        raise TypeError
    machine.spend(len(elements))
    return list(elements)


def _entries(machine: Machine, entries: Any = ()) -> dict[Any, Any]:
    if isinstance(entries, dict):
        machine.spend(len(entries))
        return dict(entries)
    flat: list[Any] = []
    for pair in _elements(machine, entries):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError
        flat.extend(pair)
    return dictionary(flat)


def _defaults(machine: Machine, _factory: Any = None, entries: Any = ()) -> dict[Any, Any]:
    return _entries(machine, entries)


def _tuple(machine: Machine, elements: Iterable[Any] = ()) -> tuple[Any, ...]:
    return tuple(_elements(machine, elements))


def _bytes(machine: Machine, text: str | bytes | bytearray | list[int] = b"", encoding: str = "latin1") -> bytes:
    machine.spend(len(text))
    if isinstance(text, str) and encoding in ("latin1", "latin-1", "ascii", "utf-8", "utf8"):
        return text.encode(encoding)
    if not isinstance(text, (bytes, bytearray, list)):
        raise TypeError
    return bytes(text)


def _complex(_machine: Machine, real: float, imaginary: float = 0.0) -> complex:
    return complex(float(real), float(imaginary))


def _object(machine: Machine, kind: Named, base: Named | None = None, state: Any = None) -> Any:
    """Build what copyreg rebuilds: an object of a class that may extend a plain container."""
    placeholder = Placeholder(kind.name)
    if isinstance(state, dict):
        placeholder.entries = _entries(machine, state)
    elif isinstance(state, (list, tuple)):
        placeholder.elements = _elements(machine, state)
    elif isinstance(base, Named) and state is not None:
        placeholder.arguments = (state,)
    return placeholder


def _new(machine: Machine, kind: Named, *arguments: Any) -> Any:
    return machine.build(kind, arguments)


def _dtype(_machine: Machine, code: Any, _align: Any = False, _copy: Any = False) -> PickledType:
    return PickledType(code)


def _array(_machine: Machine, kind: Named, _shape: Any, _code: Any) -> PickledArray:
    if kind.name not in _PLAIN_ARRAYS:
        raise TypeError
    return PickledArray()


def _array_of_buffer(_machine: Machine, content: Any, kind: Any, shape: Any, order: Any) -> PickledArray:
    array = PickledArray()
    array.fill(content, kind, (shape,) if isinstance(shape, int) else shape, order == "F")
    return array


def _scalar(_machine: Machine, kind: PickledType, content: Any = b"") -> Any:
    array = PickledArray()
    array.fill(content, kind, (), False)
    if array.stored is None:
        return Placeholder(f"numpy.{kind.name}", (content,))
    array.stored.demand_bounded(0)
    return array.stored.read("a number").item()


def _size(_machine: Machine, sizes: Any = ()) -> tuple[int, ...]:
    return whole_numbers(sizes)


def _storage(storage: Any) -> StoredBytes:
    if not isinstance(storage, StoredBytes):
        raise DamagedError("a tensor is not over a storage")
    return storage


def _tensor(
    machine: Machine,
    storage: Any,
    offset: int,
    shape: Any,
    stride: Any,
    _gradient: Any = None,
    _hooks: Any = None,
    metadata: Any = None,
) -> StoredTensor:
    dtype = _storage(storage).dtype
    if dtype is None:
        raise DamagedError("a storage has no type of numbers")
    return _tensor_of(machine, storage, offset, shape, stride, _gradient, _hooks, dtype, metadata)


def _tensor_of(
    _machine: Machine,
    storage: Any,
    offset: int,
    shape: Any,
    stride: Any,
    _gradient: Any,
    _hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> StoredTensor:
    shape, stride = whole_numbers(shape), whole_numbers(stride)
    (offset,) = whole_numbers((offset,))
    if len(shape) != len(stride) or not isinstance(dtype, torch.dtype):
        raise DamagedError("the shape and the strides of a tensor do not fit each other")
    flags = metadata if isinstance(metadata, dict) else {}
    return StoredTensor(
        _storage(storage),
        dtype,
        offset,
        shape,
        stride,
        conjugate=flags.get("conj") is True,
        negative=flags.get("neg") is True,
    )


def _parameter(_machine: Machine, data: Any, _gradient: Any = None, _hooks: Any = None, _state: Any = None) -> Any:
    return data


def _of_kind(machine: Machine, called: Named, kind: Named, arguments: Any, _state: Any = None) -> Any:
    if kind.name not in _PLAIN_TENSORS:
        return Placeholder(kind.name, (called.name,))
    return machine.build(called, arguments)


def _without_values(
    _machine: Machine, dtype: torch.dtype, shape: Any, stride: Any, _gradient: Any = None
) -> StoredTensor:
    if not isinstance(dtype, torch.dtype):
        raise TypeError
    return StoredTensor(None, dtype, 0, whole_numbers(shape), whole_numbers(stride))


def _layout(_machine: Machine, name: str) -> str:
    return str(name).removeprefix("torch.")


def _sparse(_machine: Machine, layout: str, data: tuple[Any, ...]) -> StoredSparse:
    *indices, values, shape = data[:3] if layout == "sparse_coo" else data[:4]
    if layout not in ("sparse_coo", *_COMPRESSED) or not all(isinstance(t, StoredTensor) for t in (*indices, values)):
        raise TypeError
    return StoredSparse(layout, tuple(indices), values, whole_numbers(shape))


def _of_array(_machine: Machine, array: PickledArray, dtype: Any, _device: Any, _gradient: Any) -> Any:
    if array.stored is None or array.stored.dtype is not dtype:
        raise TypeError
    return array.stored


def _of_cpu(_machine: Machine, data: Any, _dtype: Any, _device: Any, _gradient: Any) -> Any:
    return data


def _nested_storage(machine: Machine, content: bytes) -> Any:
    """Build the storage of a tensor that was pickled by itself, which holds a file of torch.save as bytes."""
    machine.spend(len(content))
    return machine.load_nested(bytes(content))


def _table() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {
        "collections.OrderedDict": _entries,
        "collections.Counter": _entries,
        "collections.defaultdict": _defaults,
        "collections.deque": _elements,
        "_codecs.encode": _bytes,
        "torch.Size": _size,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch.nn.parameter.Parameter": _parameter,
        "torch._utils._rebuild_meta_tensor_no_storage": _without_values,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._utils._rebuild_sparse_csr_tensor": _sparse,
        "torch._utils._rebuild_device_tensor_from_numpy": _of_array,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_cpu,
        "torch._tensor._rebuild_from_type_v2": _of_kind,
        "torch.serialization._get_layout": _layout,
        "torch.storage._load_from_bytes": _nested_storage,
        "numpy.dtype": _dtype,
    }
    for module in ("builtins", "__builtin__"):
        table |= {f"{module}.{name}": _elements for name in ("list", "set", "frozenset")}
        table |= {f"{module}.dict": _entries, f"{module}.tuple": _tuple, f"{module}.complex": _complex}
        table |= {f"{module}.{name}": _bytes for name in ("bytes", "bytearray")}
    for module in ("copyreg", "copy_reg"):
        table |= {f"{module}._reconstructor": _object, f"{module}.__newobj__": _new}
    for module in ("numpy.core", "numpy._core"):
        table |= {
            f"{module}.multiarray._reconstruct": _array,
            f"{module}.multiarray.scalar": _scalar,
            f"{module}.numeric._frombuffer": _array_of_buffer,
        }
    return table


CONSTRUCTORS = _table()
