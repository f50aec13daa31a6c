"""The calls of fused kernels in the forward of a module of attention."""

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ....circuits.errors import CallError
from .registry import noted_calls, registries_of
from .scores import KernelCall
from .torch_kernel import Noted, calls_kernel, kernel_calls


class KernelCalls(threading.local):
    """The calls that the latest forward of each watched module made in this thread."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._latest: dict[nn.Module, list[Noted]] = {}

    def around(self, module: nn.Module) -> Callable[..., Any]:
        """Return what runs around a module's forward.

        Args:
            module: The module.
        """
        # A module that looks its function up is watched there: it may call torch's kernel with rearranged heads.
        noted = noted_calls if registries_of(module) else kernel_calls

        def run(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            with noted() as calls:
                output = forward(*args, **kwargs)
            self._latest[module] = calls
            return output

        return run

    def take(self, module: nn.Module) -> list[Noted]:
        """Return the calls of the latest forward of a module, and forget them.

        Args:
            module: The module.
        """
        return self._latest.pop(module, [])


def one_call(calls: list[Noted], layer: str, remedy: str = "") -> KernelCall:
    """Return the call of a layer's kernel.

    Args:
        calls: The calls in the layer's forward.
        layer: The layer, for messages.
        remedy: What to do about it.

    Raises:
        CallError: There is not exactly one, or what it computes is not known.
    """
    after = f"; {remedy}" if remedy else ""
    if not calls:
        raise CallError(f"{layer} gave no attention map{after}")
    if len(calls) > 1:
        raise CallError(f"{layer} called a kernel of attention {len(calls)} times in one forward; expected one{after}")
    if isinstance(calls[0], str):
        raise CallError(f"{layer} cannot be measured: {calls[0]}{after}")
    return calls[0]


def can_be_watched(module: nn.Module) -> bool:
    """Return whether a module's code shows how it calls a kernel: by transformers' registry, or torch's by its name.

    Args:
        module: The module of attention.
    """
    return bool(registries_of(module)) or any(calls_kernel(part) for part in module.modules())
