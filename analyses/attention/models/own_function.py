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
    for filled, mask, token_types in _trials(tokens, model.pad, padded=padded, types=types):
        with torch.no_grad():
            wanted = own(filled, mask, token_types)
            largest = float(wanted.abs().max())
            for way, embedded in (("ids", None), ("embeddings", model.embed(filled))):
                adapted = model.logits(
                    filled, mask, maps=lambda _layer, _map: None, embedded=embedded, token_types=token_types
                )
                off = _largest_difference(wanted, adapted, mask)
                if not off <= rounding * largest:
                    typed = "" if token_types is None else " with token types"
                    filling = "" if bool(mask.all()) else " with padding"
                    raise CallError(
                        f"the logits of {model.name}, as qkov runs it by {way}{typed}{filling}, differ from its own by "
                        f"{off:.2g}, with logits up to {largest:.2g}, so that another function would be explained; "
                        f"this model is not supported"
                    )


def _trials(
    tokens: Int[Tensor, "1 position"], pad: int, *, padded: bool, types: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield the tokens, the mask and the token types of each trial: without padding and with it, of one text and two.

    Args:
        tokens: The sequence.
        pad: The id that stands where the mask is false.
        padded: Whether there are trials with padding.
        types: The number of token types; 0 if there are no trials with types.
    """
    length = tokens.shape[1]
    for shown in (length, length - 2) if padded else (length,):
        mask = torch.arange(length, device=tokens.device)[None] < shown
        filled = tokens.masked_fill(~mask, pad)
        yield filled, mask, None
        if types:
            second = torch.arange(length, device=tokens.device) >= mask.sum() // 2
            yield filled, mask, (second & mask).long().clamp(max=types - 1)


def _largest_difference(wanted: Tensor, adapted: Tensor, mask: Tensor) -> float:
    """Return the largest difference of two models' logits, of a language model at tokens; infinite if shapes differ."""
    if wanted.shape != adapted.shape:
        return torch.inf
    difference = wanted - adapted
    return float((difference[mask] if difference.ndim == 3 else difference).abs().max())
