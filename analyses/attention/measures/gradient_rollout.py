"""Rollout of attention weighted by the gradient of the prediction: what speaks for it, layer by layer."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ....circuits.algebra.products import upcast
from ....circuits.errors import CallError, QkovError
from ..models.alternatives import Target, demand_target, label_of
from ..models.model import AttentionModel, Batch
from .checks import demand_map, one_hot
from .fusion import hide_padding


def gradient_rollout(
    model: AttentionModel, batch: Batch, target: Target = "predicted", *, normalised: bool = False
) -> Float64[Tensor, "batch position"]:
    """Return the relevance of each token for the target, read where the prediction is; rows sum to 1.

        M_l = mean over heads of (gradient * attention of layer l)^+      R <- R + M_l R, from R = I

    The identity that R starts from, which makes every token its own explanation, is left out of the row: what is
    returned came through attention. A row in which nothing speaks for the target is all zero. The row alone is carried
    back through the layers, in O(layers * n^2); but gradients of all maps are needed at once, so the batch's maps are
    all held, which no other measure does.

    Args:
        model: whose attention it is.
        batch: of examples.
        target: of whose log-probability the gradient is taken; of continuations of several tokens, the first token's.
        normalised: whether the rows of I + M_l are brought to sum 1. M_l is otherwise weighted by the size of its
            gradient, which differs from layer to layer.

    Raises:
        CallError: the label is asked for of an example that has none, or none of the alternatives, or there is no such
            target.
        QkovError: the model gives maps without gradient, or gradients that are not finite.

    Source: Chefer et al., "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", 2021, equations 5 and 6. There the gradient is the logit's, here the log-probability's.
    """
    own = one_hot(model.reading_positions(batch), batch.mask)
    through = torch.zeros_like(own)
    # Kept apart: gradients of a sure prediction are tiny, and would be lost beside the identity's 1.
    for weighted in reversed(weighted_maps(model, batch, target)):
        own, through = own.to(weighted.device), through.to(weighted.device)
        if normalised:
            sums = 1 + weighted.sum(dim=-1)
            own, through = own / sums, through / sums
        through = through + ((own + through)[:, None] @ weighted)[:, 0]
    sums = through.sum(dim=-1, keepdim=True)
    return torch.where(sums > 0, through / sums, 0.0).cpu()


def weighted_maps(
    model: AttentionModel, batch: Batch, target: Target = "predicted"
) -> list[Float64[Tensor, "batch query key"]]:
    """Return M_l of every layer, zero in the rows and columns of padding; arguments as of `gradient_rollout`."""
    demand_target(target)
    maps: list[Tensor] = []

    def keep(layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        demand_map(layer, attention, batch.mask)
        if not attention.requires_grad:
            raise QkovError(f"the map of layer {layer} of {model.name} carries no gradient")
        maps.append(attention)

    with torch.enable_grad():
        # Weights may be frozen; what is embedded asks for gradients whatever they do.
        embedded = model.embed(batch.tokens).detach().requires_grad_()
        logits = model.logits(batch.tokens, batch.mask, maps=keep, embedded=embedded)
        total = torch.stack(_targets(batch, model.log_probabilities(batch, logits), target)).sum()
    if not maps:
        raise CallError(f"{model.name} gave no attention maps")
    gradients = torch.autograd.grad(total, maps, allow_unused=True)
    weighted = []
    for layer, (attention, gradient) in enumerate(zip(maps, gradients, strict=True)):
        if gradient is None:
            raise QkovError(f"the prediction of {model.name} does not depend on the map of layer {layer} that it gave")
        speaks = (upcast(gradient) * upcast(attention)).clamp_min_(0).mean(dim=1)
        if not hide_padding(speaks, batch.mask).isfinite().all():
            raise QkovError(f"the gradient of the map of layer {layer} of {model.name} is not finite")
        weighted.append(speaks)
    return weighted


def _targets(batch: Batch, log_probabilities: list[Tensor], target: Target) -> list[Tensor]:
    """The log-probability of each example's target."""
    return [
        found.max() if target == "predicted" else found[label_of(example, place, len(found))]
        for place, (example, found) in enumerate(zip(batch.examples, log_probabilities, strict=True))
    ]
