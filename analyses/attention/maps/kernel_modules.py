"""Attention of a user's own modules that call torch's fused kernel, which forms no map."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ....circuits.errors import CallError
from ....circuits.weights.layer_keys import LayerKey, layer_name
from ..kernels.scores import KernelCall
from ..kernels.torch_kernel import calls_kernel
from ..kernels.watching import KernelCalls, one_call
from .calls import CallHook, OnCall, around_forward, on_call
from .columns import NOT_SAID, ONE_OR_TWO, WHOLE, Unknown, is_one_sequence
from .modes import mode_before_dropout
from .numbering import numbered
from .seen import LayerMasks
from .source import InputReceiver, LayerScores, MapSource, Receiver


class KernelModules(MapSource):
    """The modules whose code calls `torch.nn.functional.scaled_dot_product_attention`, as in nanoGPT or timm.

    What they compute stays the same to the bit; their weights are computed a second time from the queries and keys that
    the kernel got. Queries and keys are of one sequence if the module is called with one sequence.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        """Take the model and its attention modules by their paths."""
        self.name = type(model).__name__
        self._modules = {key: modules[path] for path, key in numbered(list(modules)).items()}
        self.keys = tuple(self._modules)
        self._kernels, self._masks = KernelCalls(), LayerMasks()

    @classmethod
    def of(cls, model: nn.Module) -> "KernelModules | None":
        """Find the modules; return None if there are none."""
        modules = {path: module for path, module in model.named_modules() if calls_kernel(module)}
        return cls(model, modules) if modules else None

    @property
    def gives_scores(self) -> bool:
        """Whether the layers give the calls of their kernel: all of them do."""
        return True

    def during(self) -> AbstractContextManager[None]:
        """Forget the masks of an earlier call."""
        self._masks.forget()
        return nullcontext()

    def attach(
        self,
        receive: Receiver,
        *,
        inputs: InputReceiver | None = None,
        consume: bool = False,
        on_call: OnCall = on_call,
    ) -> Iterator[Callable[[], None]]:
        """Watch every module.

        Raises:
            CallError: The maps are to be consumed; there are none.
        """
        if consume:
            raise CallError(f"{self.name} computes its attention by a fused kernel, and there are no maps to read")
        for key, module in self._modules.items():
            yield around_forward(module, self._kernels.around(module))
            yield on_call(module, self._hook(key, module, receive, inputs))

    def _hook(self, key: LayerKey, module: nn.Module, receive: Receiver, inputs: InputReceiver | None) -> CallHook:
        def hook(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
            call = one_call(self._kernels.take(module), f"{layer_name(*key)} of {self.name}")
            sequences = _sequences([*args, *kwargs.values()], call)
            if inputs is not None and sequences:
                inputs(key, sequences[0])
            mode = mode_before_dropout(call.dropout, is_training=module.training)
            queries, keys = call.shape[-2:]
            if len(sequences) != 1:
                columns = ONE_OR_TWO if sequences and queries == keys else NOT_SAID
                receive(LayerScores(key, call, is_self=False, columns=columns, mode=mode))
                return
            columns = WHOLE if queries == keys else _not_said(queries, keys)
            seen = self._masks.seen_by_kernel
            receive(LayerScores(key, call, columns=columns, seen=lambda: seen(call), mode=mode))

        return hook


def _not_said(queries: int, keys: int) -> Unknown:
    return Unknown(f"a layer has {queries} queries and {keys} keys, and its module does not say which these are")


def _sequences(arguments: list[Any], call: KernelCall) -> list[Tensor]:
    """Return the distinct sequences of vectors among the arguments of a module."""
    sequences = [value for value in arguments if isinstance(value, Tensor) and value.ndim == 3]
    vectors = [value for value in sequences if value.is_floating_point() and len(value) == call.shape[0]]
    distinct: list[Tensor] = []
    for value in vectors:
        if not any(is_one_sequence(value, other) for other in distinct):
            distinct.append(value)
    return distinct
