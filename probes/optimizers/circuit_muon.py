"""CircuitMuon: Muon on the blocks of each head, or on the products W_QK and W_OV."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.live.parameters import LiveParameters
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from ...circuits.weights.attention_weights import AttentionWeights
from .orthogonal import orthogonalized

_NAMES = ("W_Q", "W_K", "W_V", "W_O")
_WAYS = ("heads", "products")


class CircuitMuon(Optimizer):
    """Trains the attention weights of a model with Muon, head by head or on the products that the loss sees.

        attention = CircuitMuon(model, lr=0.02)
        rest = torch.optim.AdamW(attention.others, lr=3e-4)

    With B the momentum of a gradient G (B <- momentum B + G, and G + momentum B in its place with Nesterov's), and
    msign(U S V') = U V', one step of each head is

    - `of="heads"`: W <- W - lr r msign(B), with B the block of the head alone, W_Q, W_K and W_V with d_head outputs and
      W_O with d_model outputs. r is sqrt(max(1, outputs / inputs)), or 0.2 sqrt(max(outputs, inputs)) to match the
      size of AdamW's steps. Heads that share keys and values have one block of W_K and of W_V. Kimi K3 (2026, section
      2.5) and GLM-5 (2026) train so.
    - `of="products"`: Compositional Muon (Keigwin et al., "Towards Compositional Steepest Descent", 2026), in which
      each factor's step is measured by what it does to the product. With weights [d_model, d_head] and C_K = (W_K'W_K
      + damping)^{1/2}, W_Q <- W_Q - lr/2 msign(B C_K^{-1}) C_K^{-1}, and likewise W_K with C_Q and W_V with C_O. W_O is
      one matrix for all heads: msign is taken of their blocks B C_V^{-1} side by side. The change of W_QK then has a
      spectral norm of about lr at most.

    Weight decay is decoupled: W <- W - lr weight_decay W. Biases and all other parameters are left to another optimizer
    (`others`). Fused weights are taken apart as the model's architecture says.

    Attributes:
        others: The model's other parameters that are trained.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        of: str = "heads",
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        iterations: int = 5,
        match_adamw: bool = False,
        damping: float = 1e-6,
        options: ReadingOptions | Mapping | None = None,
        **reading: Unpack[ModelKeywords],
    ) -> None:
        """Find the attention weights of a model.

        Args:
            model: The model, whose attention is found as `open_model` finds it.
            lr: The learning rate.
            of: "heads" or "products".
            momentum: The momentum.
            nesterov: Whether the momentum is Nesterov's.
            weight_decay: The decoupled weight decay.
            iterations: The iterations of each orthogonalization.
            match_adamw: Whether steps are of the size of AdamW's; for "heads" alone.
            damping: What is added to W'W before its root is taken, as a share of its mean eigenvalue; for "products".
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: A number is not possible; a parameter holds attention weights beside others, or as something
                other than its own entries; the attention is trained collapsed or is frozen; or heads share keys and
                values, for "products".
            QkovError: No attention is found.
        """
        if of not in _WAYS:
            raise CallError(f"of should be 'heads' or 'products', got {of!r}")
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay), ("damping", damping)):
            if not (isinstance(value, int | float | Tensor) and math.isfinite(value) and value >= 0):
                raise CallError(f"{name} should be a finite number of at least 0, got {value!r}")
        if of == "products" and match_adamw:
            raise CallError("match_adamw is for of='heads': the steps of products have a size of their own")
        self._live = LiveParameters(model, reading_options(options, reading, ModelKeywords))
        parameters = _attention_parameters(self._live, model, of)
        defaults = {
            "lr": lr,
            "of": of,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "iterations": iterations,
            "match_adamw": match_adamw,
            "damping": damping,
        }
        super().__init__(parameters, defaults)
        own = {id(parameter) for parameter in parameters}
        self.others = [each for each in model.parameters() if each.requires_grad and id(each) not in own]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the group of the attention weights.

        Args:
            param_group: The group.

        Raises:
            CallError: There is that group already.
        """
        if self.param_groups:
            raise CallError("CircuitMuon trains the attention weights alone: give others to another optimizer")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step.

        Args:
            closure: Computes the loss and its gradients anew, if they are not there yet.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        directions: dict[int, Tensor] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                directions[id(parameter)] = self._direction(parameter, group)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
        steps = _steps_of_heads if group["of"] == "heads" else _steps_of_products
        moved = self._live.read(lambda parameter: directions.get(id(parameter), _nothing(parameter)))
        weights = self._live.read(lambda parameter: parameter.detach())
        for of_layer, layer in zip(moved.layers(), weights.layers(), strict=True):
            # All steps of a layer are computed from its weights before any of them.
            for name, step in list(steps(layer, of_layer, group)):
                getattr(layer, name).sub_(step, alpha=float(group["lr"]))
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the momentum of a parameter after its gradient was added."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "the parameter has a gradient"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        return gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


def _steps_of_heads(
    layer: AttentionWeights, directions: AttentionWeights, group: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the step of each weight, each head by itself."""
    for name in _NAMES:
        weight, direction = getattr(layer, name), getattr(directions, name)
        if weight is not None:
            inputs, outputs = weight.shape[-2:]
            ratio = (
                0.2 * math.sqrt(max(outputs, inputs)) if group["match_adamw"] else math.sqrt(max(1, outputs / inputs))
            )
            yield name, ratio * orthogonalized(direction, group["iterations"])


def _steps_of_products(
    layer: AttentionWeights, directions: AttentionWeights, group: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the step of each weight, whitened by the weight with which it is multiplied."""
    iterations, damping = group["iterations"], group["damping"]
    for name, partner in (("W_Q", "W_K"), ("W_K", "W_Q"), ("W_V", "W_O")):
        weight, direction, other = getattr(layer, name), getattr(directions, name), getattr(layer, partner)
        if weight is not None and other is not None:
            root = _inverse_root(other if name != "W_V" else other.mT, damping)
            yield name, orthogonalized(direction @ root, iterations) @ root / 2
    if layer.W_O is not None and layer.W_V is not None and directions.W_O is not None:
        root = _inverse_root(layer.W_V, damping)
        whitened = root @ directions.W_O
        heads, rank, width = whitened.shape
        together = orthogonalized(whitened.reshape(heads * rank, width), iterations).reshape(heads, rank, width)
        yield "W_O", root @ together / 2


def _inverse_root(weights: Float[Tensor, "head long rank"], damping: float) -> Float[Tensor, "head rank rank"]:
    """Return (W'W + damping)^{-1/2} of each head, with the damping relative to the mean eigenvalue of W'W."""
    wide = weights.to(torch.float64)
    values, vectors = torch.linalg.eigh(wide.mT @ wide)
    values = values.clamp(min=0)
    shifted = values + damping * values.mean(dim=-1, keepdim=True)
    roots = torch.where(shifted > 0, shifted, torch.inf).rsqrt()
    return ((vectors * roots[..., None, :]) @ vectors.mT).to(weights.dtype)


def _nothing(parameter: Tensor) -> Tensor:
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _attention_parameters(live: LiveParameters, model: nn.Module, of: str) -> list[nn.Parameter]:
    """Return the parameters that hold the attention weights, once it is known that they can be trained through them."""
    named = dict(model.named_parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(named.values())}
    storages = {parameter.untyped_storage().data_ptr() for parameter in named.values()}
    numbered = live.read(lambda parameter: _number_of(numbers[id(parameter)], parameter))
    entries = dict.fromkeys(numbers.values(), 0)
    for layer, places in zip(live.read(lambda each: each.detach()).layers(), numbered.layers(), strict=True):
        if layer.W_QK is not None or layer.W_OV is not None:
            raise CallError(
                f"{layer.label} has a collapsed circuit, which has no heads: train it with torch.optim.Muon"
            )
        if of == "products" and layer.group_size > 1:
            raise CallError(
                f"the heads of {layer.label} share keys and values, and the rule for products is that of a head with "
                f"its own: use of='heads'"
            )
        for name in _NAMES:
            weight = getattr(layer, name)
            if weight is None:
                continue
            if weight.untyped_storage().data_ptr() not in storages:
                raise CallError(
                    f"{name} of {layer.label} is computed from its parameters, not kept in them, so the step of a head "
                    f"is not that of a parameter: train it with another optimizer"
                )
            found, counts = getattr(places, name).unique(return_counts=True)
            for number, count in zip(found.tolist(), counts.tolist(), strict=True):
                entries[int(number)] += count
    parameters = []
    for number, (name, parameter) in enumerate(named.items()):
        if entries[number] not in (0, parameter.numel()):
            raise CallError(
                f"{entries[number]} of the {parameter.numel()} entries of {name} are attention weights: train it with "
                f"another optimizer"
            )
        if entries[number] and parameter.requires_grad:
            parameters.append(parameter)
    if not parameters:
        raise CallError("the attention weights are frozen: unfreeze them before you make the optimizer")
    return parameters


def _number_of(number: int, parameter: Tensor) -> Tensor:
    """Return a number in the shape of a parameter, without its memory."""
    return torch.tensor(float(number), dtype=torch.float64).expand(parameter.shape)
