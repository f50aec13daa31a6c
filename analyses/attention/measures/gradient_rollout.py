"""Rollout of attention weighted by the gradient of the prediction: attention that supports it, layer by layer."""

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
    """Return the relevance of each token for the target, read where the prediction is read.

        M_l = mean over heads of (gradient * attention of layer l)^+      R <- R + M_l R, from R = I

    M_l and R are [query, key]. The identity that R starts from, which makes every token its own explanation, is left
    out of the row, so the row holds only what came through attention. If nothing supports the target, the row is all
    zero. Only the row is carried back through the layers, in O(layers * n^2) for n positions; but the gradients of all
    maps are needed at once, so all maps of the batch are held in memory, which no other measure needs.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        target: the alternative whose log-probability is differentiated: what the model predicts, or the example's
            label. For continuations of several tokens it is that of the first token.
        normalised: whether to divide the rows of I + M_l by their sums. Otherwise M_l is weighted by the size of its
            gradient, which differs from layer to layer.

    Returns:
        [batch, position]; each row sums to 1 over the tokens of its example, or is all zero.

    Raises:
        CallError: The label is the target and an example has none or one that is not among the alternatives, or the
            target is unknown.
        QkovError: The model gives maps without gradient, or gradients that are not finite.

    Source: Chefer et al., "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", 2021, equations 5 and 6. They differentiate the logit; here it is the log-probability.
    """
    own = one_hot(model.reading_positions(batch), batch.mask)
    through = torch.zeros_like(own)
    # The two are kept apart: gradients of a confident prediction are tiny and would be lost beside the identity's 1.
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
    """Return M_l of every layer, with the rows and columns of padding set to zero.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        target: the alternative whose log-probability is differentiated.

    Raises:
        CallError: The target is unknown, or a label is missing or not among the alternatives.
        QkovError: The model gives maps without gradient, or gradients that are not finite.
    """
    demand_target(target)
    maps: list[Tensor] = []

    def keep(layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        demand_map(layer, attention, batch.mask)
        if not attention.requires_grad:
            raise QkovError(f"the map of layer {layer} of {model.name} carries no gradient")
        maps.append(attention)

    with torch.enable_grad():
        # The weights may be frozen; the embeddings require gradients in any case.
        embedded = model.embed(batch.tokens).detach().requires_grad_()
        logits = model.logits(batch.tokens, batch.mask, maps=keep, embedded=embedded, token_types=batch.token_types)
        total = torch.stack(_targets(batch, model.log_probabilities(batch, logits), target)).sum()
    if not maps:
        raise CallError(f"{model.name} gave no attention maps")
    gradients = torch.autograd.grad(total, maps, allow_unused=True)
    weighted = []
    for layer, (attention, gradient) in enumerate(zip(maps, gradients, strict=True)):
        if gradient is None:
            raise QkovError(f"the prediction of {model.name} does not depend on the map of layer {layer} that it gave")
        supporting = (upcast(gradient) * upcast(attention)).clamp_min_(0).mean(dim=1)
        if not hide_padding(supporting, batch.mask).isfinite().all():
            raise QkovError(f"the gradient of the map of layer {layer} of {model.name} is not finite")
        weighted.append(supporting)
    return weighted


def _targets(batch: Batch, log_probabilities: list[Tensor], target: Target) -> list[Tensor]:
    """Return the log-probability of each example's target."""
    return [
        alternatives.max() if target == "predicted" else alternatives[label_of(example, number, len(alternatives))]
        for number, (example, alternatives) in enumerate(zip(batch.examples, log_probabilities, strict=True))
    ]
