"""The check that a model computes the same by its adapter as in its owner's calls."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ....circuits.errors import CallError
from .model import AttentionModel

#: Calls the model as its owner does: with tokens, a mask, and token types or None; returns logits.
OwnCall = Callable[[Tensor, Tensor, Tensor | None], Float[Tensor, "batch *position output"]]


def demand_own_function(
    model: AttentionModel, own: OwnCall, tokens: Int[Tensor, "1 position"], *, padded: bool, types: int, rounding: float
) -> None:
    """Refuse a model that computes something else than its owner's calls do, by ids or by embeddings.

    Args:
        model: The model as it is measured.
        own: Calls it as its owner does.
        tokens: One sequence to try it on.
        padded: Whether the sequence is tried with padding as well.
        types: The number of token types that it is tried with; 0 for none.
        rounding: The largest difference that counts as rounding, as a share of the largest logit.

    Raises:
        CallError: The logits differ by more than rounding; the message says how the model was called and by how much.
    """
    length = tokens.shape[1]
    for shown in (length, length - 2) if padded else (length,):
        mask = torch.arange(length, device=tokens.device)[None] < shown
        filled = tokens.masked_fill(~mask, model.pad)
        for token_types in _token_types(mask, types):
            with torch.no_grad():
                wanted = own(filled, mask, token_types)
                for way, embedded in (("ids", None), ("embeddings", model.embed(filled))):
                    adapted = model.logits(
                        filled, mask, maps=lambda _layer, _map: None, embedded=embedded, token_types=token_types
                    )
                    if wanted.shape == adapted.shape and wanted.ndim == 3:
                        difference = wanted[mask] - adapted[mask]
                    else:
                        difference = wanted - adapted if wanted.shape == adapted.shape else torch.tensor(torch.inf)
                    largest, off = float(wanted.abs().max()), float(difference.abs().max())
                    if not off <= rounding * largest:
                        typed = "" if token_types is None else " with token types"
                        filling = "" if shown == length else " with padding"
                        raise CallError(
                            f"the logits of {model.name}, as qkov runs it by {way}{typed}{filling}, differ from its "
                            f"own by {off:.2g}, with logits up to {largest:.2g}, so that another function would be "
                            f"explained; this model is not supported"
                        )


def _token_types(mask: Tensor, types: int) -> Iterator[Tensor | None]:
    """Yield the token types of each trial: none, and those of two texts."""
    yield None
    if types:
        second = torch.arange(mask.shape[1], device=mask.device) >= mask.sum() // 2
        yield (second & mask).long().clamp(max=types - 1)
