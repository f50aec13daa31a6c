"""What a layer with adapters of PEFT computes, as plain weights: PEFT merges them itself, into a copy of the layer."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.tensor_file import in_memory
from ..errors import QkovError

#: How many inputs compare a layer with its merged weights, and how far outputs may differ: some kinds of adapters
#: compute in float32 whatever the type of their weights.
_INPUTS, _ROUNDING = 4, 1e-6
#: Layers that are not linear maps of their inputs, or are not called, whose merged weights PEFT defines.
_NOT_COMPARED = ("MultiheadAttention", "ParamWrapper", "LNTuningLayer")


def merged(layer: Any, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a layer by name, with its active adapters merged into them, in float64.

    Of a linear layer, the outputs for a few inputs are compared with those of the merged weights, since some adapters
    (several with DoRA, routed ones) do not amount to the weights that PEFT merges.

    Args:
        layer: A module of PEFT around the layer, which is not changed.
        whole: Returns the whole value of a tensor that is spread over processes, and any other tensor as it is.

    Raises:
        QkovError: The layer does not compute what the merged weights do, or is not known.
    """
    twin = copied(layer, whole)
    base = twin.get_base_layer()
    is_linear = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
    if not is_linear and type(layer).__name__ not in _NOT_COMPARED:
        raise QkovError(f"it is around a {type(base).__name__}, which is not a linear layer")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not is_linear:
            return _merge(twin)
        # Inputs that draw no random numbers, since those of training have to stay the same.
        width = base.weight.shape[1 if isinstance(base, nn.Linear) else 0]
        inputs = torch.arange(_INPUTS * width, dtype=torch.float64).reshape(_INPUTS, -1).sin()
        outputs = type(twin).forward(twin, inputs)
        weights = _merge(twin)
    matrix = weights["weight"].mT if isinstance(base, nn.Linear) else weights["weight"]
    _demand_same(outputs, inputs, matrix, weights.get("bias"))
    return weights


def unmerged(layer: Any, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a layer by name, without the adapters that were merged into them, in float64.

    Args:
        layer: A module of PEFT around the layer, which is not changed.
        whole: Returns the whole value of a tensor that is spread over processes, and any other tensor as it is.

    Raises:
        QkovError: The adapters are of a kind that cannot be taken out again exactly.
    """
    twin = copied(layer, whole)
    if not hasattr(twin, "lora_A") or twin.lora_variant:
        raise QkovError("they are merged, and cannot be taken out exactly: call unmerge_adapter()")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin.unmerge()
    return _parameters(twin.get_base_layer(), recurse=merges_whole(twin))


def merges_whole(layer: Any) -> bool:
    """Return whether PEFT merges a layer together with the layers inside, as it does a torch.nn.MultiheadAttention."""
    return hasattr(layer, "unload_and_optionally_merge_module")


def copied(module: Any, whole: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a module in float64, as in evaluation, on the CPU and without hooks.

    Args:
        module: The module; what it holds beside modules, parameters and buffers is shared.
        whole: Returns the whole value of a tensor that is spread over processes, and any other tensor as it is.

    Raises:
        QkovError: A module inside computes by a function of its own, or its weights are quantised.
    """
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        raise QkovError(f"the forward function of its {type(module).__name__} was replaced")
    twin = module.__class__.__new__(module.__class__)
    for name, value in vars(module).items():
        # A list of adapters that are merged, and what they keep meanwhile, belong to the copy alone.
        vars(twin)[name] = value.copy() if isinstance(value, (list, dict)) else value
        if name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
    for name in ("forward", "_hf_hook", "_old_forward"):
        vars(twin).pop(name, None)
    twin._parameters = {
        name: None if value is None else _parameter(whole(value), name) for name, value in module._parameters.items()
    }
    twin._buffers = {name: None if value is None else _wide(value, name) for name, value in module._buffers.items()}
    twin._modules = {name: None if value is None else copied(value, whole) for name, value in module._modules.items()}
    vars(twin)["training"] = False
    return twin


def _merge(twin: Any) -> dict[str, Tensor]:
    if merges_whole(twin):
        base = twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return _parameters(base, recurse=True)
    base, layer = twin.get_base_layer(), twin
    if any(getattr(twin, "lora_bias", {}).values()) and base.bias is None:
        base.bias = nn.Parameter(torch.zeros(twin.out_features, dtype=torch.float64), requires_grad=False)
    inner = []
    while hasattr(layer, "merge"):
        inner.append(layer)
        layer = layer.base_layer
    for layer in reversed(inner):
        layer.merge()
    return _parameters(twin.get_base_layer())


def _demand_same(outputs: Tensor, inputs: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    expected = inputs @ matrix + (0.0 if bias is None else bias)
    error, size = (outputs - expected).norm(), expected.norm() + inputs.norm() * matrix.norm()
    if error > _ROUNDING * size:
        raise QkovError(
            f"what the layer computes is not what its merged weights do, by {float(error / size):.1e} of the size of "
            f"its outputs; merge the adapters (merge_and_unload), or switch on one of them alone"
        )


def _parameters(module: nn.Module, recurse: bool = False) -> dict[str, Tensor]:
    named = module.named_parameters(recurse=recurse)
    return {name.replace(".base_layer", ""): parameter.detach() for name, parameter in named}


def _parameter(value: Tensor, name: str) -> nn.Parameter:
    if not value.is_floating_point():
        raise QkovError(f"its {name} holds {value.dtype} numbers (quantised weights are not read)")
    return nn.Parameter(_wide(value, name), requires_grad=False)


def _wide(value: Tensor, name: str) -> Tensor:
    held = in_memory(value, name)
    return held.to(torch.float64, copy=True) if held.is_floating_point() else held
