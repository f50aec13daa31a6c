"""The adapters of PEFT in a model: the names of its weights without them, and the weights that they change."""

from collections.abc import Callable, Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import QkovError
from .merging import merged, merges_whole, unmerged


class AdaptedLayer:
    """A module of PEFT around a layer whose weights it changes.

    Attributes:
        module: The module.
        kind: The method in PEFT's words, such as lora.
        label: The path of the module, for messages.
    """

    def __init__(self, module: Any, label: str, is_off: bool) -> None:
        """Take a module.

        Args:
            module: The module.
            label: The path of the module, for messages.
            is_off: Whether the layer counts as if it had no adapters, although they are merged into it.
        """
        self.module, self.label, self._is_off = module, label, is_off
        self.kind = _kind(module)

    def weights(self, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the layer's parameters by name, as its adapters change them, in float64 and on the CPU.

        Args:
            whole: Returns the whole value of a tensor that is spread over processes, and any other tensor as it is.

        Raises:
            QkovError: The adapters do not amount to weights that can be told.
        """
        compute = unmerged if self._is_off else merged
        try:
            return compute(self.module, whole)
        except Exception as error:
            raise QkovError(
                f"{self.label} has adapters of the type {self.kind} ({type(self.module).__name__}), whose weights "
                f"cannot be read: {error}"
            ) from error


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """A weight that adapters change, which is computed when it is read.

    Attributes:
        layer: The layer.
        name: The name of the parameter in the layer.
        base: The parameter without the adapters; None for a bias that only adapters add.
        parts: The parameters of which the weight is made, with their names in the model.
        shape: The shape of the weight.
        is_refused: Whether it is not to be read, since a parameter is wanted.
    """

    layer: AdaptedLayer
    name: str
    base: Tensor | None
    parts: tuple[tuple[str, nn.Parameter], ...]
    shape: torch.Size
    is_refused: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether any of its parts is trained."""
        return any(part.requires_grad for _, part in self.parts)

    @property
    def label(self) -> str:
        """The weight's name in the model, for messages."""
        return f"{self.layer.label}.{self.name}"

    def demand_readable(self) -> None:
        """Refuse a weight where a parameter is wanted.

        Raises:
            QkovError: It is not to be read.
        """
        if self.is_refused:
            raise QkovError(
                f"{self.label} is made with adapters ({self.layer.kind}) and is not a parameter itself: merge them "
                f"first (merge_and_unload), or set what you want to set for the adapters' own parameters"
            )


Entry = Tensor | AdaptedWeight


def adapted_names(model: Any) -> frozenset[str]:
    """Return the names, without adapters, of the parameters that adapters of PEFT can change or take the place of.

    Args:
        model: Any model; one that is not a torch.nn.Module has no adapters.
    """
    if not isinstance(model, nn.Module):
        return frozenset()
    found = _found(model)
    names: set[str | None] = set()
    for path, module in found.items():
        is_layer = _is_layer(module)
        base = module.get_base_layer() if is_layer else module.original_module
        at = f"{path}{'.base_layer' * len(list(_chain(module))) if is_layer else '.original_module'}"
        names |= {
            _plain_name(f"{at}.{name}", found, on=False) for name, _ in base.named_parameters(recurse=not is_layer)
        }
    return frozenset(name for name in names if name is not None)


def without_peft(model: Any) -> Any:
    """Return the model inside PEFT's own wrapper; any other model is returned as it is."""
    return model.get_base_model() if _is_a(model, "PeftModel") else model


def without_base_layer(model: nn.Module, path: str) -> str:
    """Return the path that a module has without a layer of PEFT around it.

    Args:
        model: The model.
        path: The path of the module in it.
    """
    parent, _, name = path.rpartition(".")
    return parent if name == "base_layer" and _is_layer(model.get_submodule(parent)) else path


def with_adapters(model: nn.Module, state: Dictionary[str, Tensor], on: bool = True) -> dict[str, Entry]:
    """Return a model's state under the names that it has without adapters, with the weights as adapters change them.

    Args:
        model: The model.
        state: Its state dict, with the parameters themselves or without gradient.
        on: Whether adapters count; otherwise the weights are those without them, as if all were switched off.

    Raises:
        QkovError: An adapter takes the place of the attention itself.
    """
    _demand_weights(model)
    found = _found(model)
    if not found:
        return dict(state)
    entries: dict[str, Entry] = {}
    for name, tensor in state.items():
        plain = _plain_name(name, found, on)
        if plain is not None:
            entries[plain] = tensor
    for path, module in found.items():
        # A module around another one of PEFT states its weights together with those of the inner ones.
        if _is_layer(module) and _is_outermost(path, found):
            entries.update(_adapted(path, module, found, state, on))
    return entries


def _found(model: nn.Module) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if _is_layer(module) or _is_copy(module)}


def _adapted(
    path: str, module: Any, found: dict[str, Any], state: Dictionary[str, Tensor], on: bool
) -> Iterator[tuple[str, AdaptedWeight]]:
    """Yield the weights of a layer that its adapters change now."""
    chain = list(_chain(module))
    is_merged = any(layer.merged_adapters for layer in chain)
    is_off = not on or any(layer.disable_adapters for layer in chain)
    if is_off != is_merged or not (is_merged or any(map(_has_active, chain))):
        return
    base: nn.Module = module.get_base_layer()
    at = f"{path}{'.base_layer' * len(chain)}."
    own = [
        (f"{path}.{name}", parameter)
        for name, parameter in module.named_parameters()
        if _plain_name(f"{path}.{name}", found, on) is None
    ]
    names = {
        name: (tuple(parameter.shape), name.replace(".base_layer", ""))
        for name, parameter in base.named_parameters(recurse=merges_whole(module))
        if _plain_name(f"{at}{name}", found, on) is not None
    }
    if "bias" not in names and any(any(getattr(layer, "lora_bias", {}).values()) for layer in chain):
        names["bias"] = (module.out_features,), "bias"
    layer = AdaptedLayer(module, _plain_name(path, found, on) or path, is_off)
    for name, (shape, in_layer) in names.items():
        parameter = state.get(f"{at}{name}")
        own_base = [(f"{at}{name}", parameter)] if isinstance(parameter, nn.Parameter) else []
        whole = _plain_name(f"{at}{name}", found, on) or name
        yield whole, AdaptedWeight(layer, in_layer, parameter, (*own, *own_base), torch.Size(shape))


def _plain_name(name: str, found: dict[str, Any], on: bool) -> str | None:
    """Return the name of a tensor without adapters, or None for a tensor of the adapters alone."""
    at, kept, rest = [], [], name.split(".")
    while rest:
        inside = _place_of_base(found.get(".".join(at)), on)
        if rest[: len(inside)] != inside:
            return None
        taken = inside or rest[:1]
        kept += [] if inside else taken
        at, rest = at + taken, rest[len(taken) :]
    return ".".join(kept)


def _place_of_base(module: Any, on: bool) -> list[str]:
    """Return the path inside a module of PEFT to the module that is computed with; empty for any other module."""
    if module is None:
        return []
    if _is_layer(module):
        return ["base_layer"]
    copies = module._modules
    if "token_adapter" in copies:
        return ["token_adapter"]
    trained = copies.get("modules_to_save", {})
    active = [name for name in module.active_adapters if name in trained]
    is_copied = on and not module.disable_adapters and active
    return ["modules_to_save", active[0]] if is_copied else ["original_module"]


def _is_outermost(path: str, found: dict[str, Any]) -> bool:
    """Return whether no layer of PEFT around a layer states its weights together with its own."""
    around = [path[:at] for at in range(len(path)) if path.startswith(".base_layer", at)]
    return not any(outer in found and (path == f"{outer}.base_layer" or merges_whole(found[outer])) for outer in around)


def _chain(module: Any) -> Iterator[Any]:
    while _is_layer(module):
        yield module
        module = module.base_layer


def _has_active(layer: Any) -> bool:
    held = [getattr(layer, name) for name in layer.adapter_layer_names]
    return any(active in of_name for active in layer.active_adapters for of_name in held if hasattr(of_name, "keys"))


def _demand_weights(model: nn.Module) -> None:
    """Refuse methods of PEFT that put a module of their own in the place of attention."""
    for module in model.modules():
        for config in getattr(module, "peft_config", {}).values() if _is_a(module, "PeftModel") else ():
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            if kind == "ADAPTION_PROMPT":
                raise QkovError(
                    f"the model {type(model).__name__} has adapters of the type {kind.lower()}, which take the place "
                    f"of its attention and add to what it writes, so that it has no W_OV: read the model without them"
                )


def _is_layer(module: Any) -> bool:
    return _is_a(module, "BaseTunerLayer")


def _is_copy(module: Any) -> bool:
    return _is_a(module, "AuxiliaryTrainingWrapper")


def _is_a(module: Any, name: str) -> bool:
    """Return whether a module is of a class of PEFT, which is not imported for it."""
    return name in _classes_of_peft(type(module))


@lru_cache(maxsize=1024)
def _classes_of_peft(kind: type) -> frozenset[str]:
    return frozenset(base.__name__ for base in kind.__mro__ if base.__module__.startswith("peft."))


def _kind(module: Any) -> str:
    return type(module).__module__.removeprefix("peft.tuners.").partition(".")[0]
