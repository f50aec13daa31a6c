"""Where a classifier reads its prediction, which the gradient of its outputs shows; logits in full precision."""

import torch
from jaxtyping import Int
from torch import Tensor

from .model import AttentionModel


def queries_read(model: AttentionModel, tokens: Int[Tensor, "one position"]) -> list[int]:
    """Return the queries of the last layer's map that a classifier's outputs depend on.

    Args:
        model: The classifier.
        tokens: One sequence to try it on.
    """
    last: list[Tensor] = []

    def keep(_layer: int, attention: Tensor) -> None:
        last[:] = [attention]

    with torch.enable_grad():
        embedded = model.embed(tokens).detach().requires_grad_()
        logits = model.logits(tokens, torch.ones_like(tokens, dtype=torch.bool), maps=keep, embedded=embedded)
        (gradient,) = torch.autograd.grad(logits[0, 0], last)
    return gradient.abs().sum(dim=(0, 1, 3)).nonzero().flatten().tolist()


def as_float(logits: Tensor) -> Tensor:
    """Return logits in float32 if they are in half precision."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
