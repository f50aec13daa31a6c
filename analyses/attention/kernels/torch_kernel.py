"""Calls of torch.nn.functional.scaled_dot_product_attention, as they happen in the forward of a module."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .scores import KernelCall, MaskRows, causal, of_tensor

_NAME = "scaled_dot_product_attention"
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: A call of a kernel, or the reason why what it computes is not known.
Noted = KernelCall | str


class _Watching(TorchFunctionMode):
    """Takes what the kernel is called with, and calls it as it is."""

    def __init__(self, calls: list[Noted]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            self._calls.append(kernel_call(**dict(zip(_PARAMETERS, args, strict=False)), **kwargs))
        return output


@contextmanager
def kernel_calls() -> Iterator[list[Noted]]:
    """Collect the calls of the kernel in this thread; what is computed stays the same to the bit.

    A mode of this kind switches off torch's fast paths of whole layers, so it should be on in modules of attention
    alone.
    """
    calls: list[Noted] = []
    with _Watching(calls):
        yield calls


def kernel_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Noted:
    """Return a call of the kernel with its arguments, or the reason why it is not known what these stand for.

    Args:
        query: [batch, head, query, d_head].
        key: The keys in the same form; if `enable_gqa`, with fewer heads.
        value: The values.
        attn_mask: True where a query sees a key, or numbers that are added to scores.
        dropout_p: The rate of dropout.
        is_causal: Whether query i sees the keys up to i.
        scale: The factor of the products; 1 / sqrt(d_head) by default.
        enable_gqa: Whether heads share keys.
    """
    del value, enable_gqa
    if query.ndim != 4 or key.ndim != 4:
        return f"torch's kernel got queries of shape {list(query.shape)}; expected [batch, head, query, d_head]"
    masks: list[MaskRows] = []
    if is_causal:
        places = torch.arange(max(query.shape[-2], key.shape[-2]), device=query.device)
        masks.append(causal(places[: query.shape[-2]], places[: key.shape[-2]]))
    if attn_mask is not None:
        masks.append(of_tensor(_with_heads(attn_mask)))
    return KernelCall(
        in_kernel_type(query),
        in_kernel_type(key),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        masks=tuple(masks),
        dropout=dropout_p,
        mask=attn_mask if attn_mask is not None and attn_mask.ndim == 4 and not is_causal else None,
    )


def _with_heads(mask: Tensor) -> Tensor:
    """Return a mask as [batch, head, query, key]."""
    return mask.detach()[(None,) * (4 - mask.ndim)]


def in_kernel_type(tensor: Tensor) -> Tensor:
    """Return queries or keys in the type that autocast gives them where the kernel is called.

    Args:
        tensor: The queries or keys.
    """
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def calls_kernel(module: nn.Module) -> bool:
    """Return whether the code of a module's class calls the kernel by its name, itself or in its own file's functions.

    Args:
        module: The module; what is inside it does not count.
    """
    return _class_calls(type(module))


@cache
def _class_calls(kind: type[nn.Module]) -> bool:
    own = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base.__module__ not in _TORCH]
    methods = [value for base in own for value in vars(base).values()]
    return any(_names_kernel(method, set()) for method in methods)


#: Modules of torch whose own layers find the kernel by themselves.
_TORCH = ("torch.nn.modules.module", "torch.nn.modules.activation", "torch.nn.modules.transformer")


def _names_kernel(value: Any, seen: set[Any]) -> bool:
    function: Any = inspect.unwrap(value) if callable(value) else getattr(value, "__func__", None)
    code = getattr(function, "__code__", None)
    if code is None or function in seen:
        return False
    seen.add(function)
    names = _names(code)
    values = [function.__globals__.get(name) for name in names]
    if _NAME in names or any(value is functional.scaled_dot_product_attention for value in values):
        return True
    helpers = (helper for helper in values if inspect.isfunction(helper))
    return any(_names_kernel(helper, seen) for helper in helpers if helper.__module__ == function.__module__)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function's code uses, with the functions inside it."""
    inside = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inside)
