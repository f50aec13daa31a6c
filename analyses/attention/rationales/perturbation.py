"""Removal of tokens from inputs: which can be removed, which come first, how many, and what replaces them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from ....circuits.errors import CallError
from ...tasks.example import Example
from ..models.model import AttentionModel, Batch
from ..paper_convention import PADDED_LENGTH, PAPER_CUT, Convention, demand_convention, padded_cut_size, partly_sorted

#: The cuts of DeYoung et al. 2020, as shares of the tokens.
ERASER_CUTS = (0.01, 0.05, 0.1, 0.2, 0.5)

#: `deletion`: the token is deleted and those after it move up, in their order. `mask token`: the model's mask token
#: replaces it. `attention mask`: it keeps its position and nothing attends to it; but models that count positions by
#: the attention mask, as OPT and BLOOM do, move up those after it.
Removal = Literal["deletion", "mask token", "attention mask"]


@dataclass(frozen=True)
class Perturbation:
    """How many tokens are removed, and how.

    If n tokens can be removed, a cut takes the first k = ceil(cut n) of the ranking, at least 1 and at most n, or n - 1
    if no token would be left to the model otherwise. A cut of 0 takes none. k does not depend on the removal.

    Attributes:
        cuts: shares of the tokens that can be removed, each from 0 to 1.
        removal: what happens to a token that is removed: "deletion", "mask token" or "attention mask".
        keep_readout: whether the token at which the prediction is read is never removed, as special tokens never are. A
            causal language model continues its last token, and without it the model answers another question. The mask
            token of a masked language model is kept in any case.
        convention: "paper" takes k = max(1, floor(cut * padded_length)) tokens from every sequence, and puts the tokens
            that sufficiency keeps in the order in which a partial sort leaves them.
        padded_length: length of the paper's sequences; not used in the standard convention.

    Raises:
        CallError: A setting is out of its range, or the paper's convention is combined with a removal other than
            deletion.

    Source: DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", 2020, section 4.2, for the cuts;
    the paper's released code for its convention.
    """

    cuts: tuple[float, ...] = ERASER_CUTS
    removal: Removal = "deletion"
    keep_readout: bool = True
    convention: Convention = "standard"
    padded_length: int = PADDED_LENGTH

    def __post_init__(self) -> None:
        """Refuse settings that are out of range."""
        if not self.cuts or len(set(self.cuts)) < len(self.cuts) or not all(0 <= cut <= 1 for cut in self.cuts):
            raise CallError(f"cuts should be different shares of the tokens, from 0 to 1; got {self.cuts}")
        if self.removal not in get_args(Removal):
            raise CallError(f"removal should be one of {', '.join(get_args(Removal))}; got {self.removal!r}")
        demand_convention(self.convention)
        if self.padded_length < 1:
            raise CallError(f"padded_length should be at least 1; got {self.padded_length}")
        if self.convention == "paper" and self.removal != "deletion":
            raise CallError(f"the paper's convention deletes tokens; got removal={self.removal!r}")

    def demand_fit(self, model: AttentionModel) -> None:
        """Refuse a model whose tokens cannot be removed in this way.

        Raises:
            CallError: Tokens are to be replaced by the mask token, and the model has none.
        """
        if self.removal == "mask token" and model.mask_token is None:
            raise CallError(
                f"{model.name} has no mask token to replace a removed token; use removal='deletion' or 'attention "
                f"mask', or give its adapter the mask token of its tokenizer"
            )

    def cut_size(self, cut: float, removable: int, others: int) -> int:
        """Return how many tokens a cut takes.

        Args:
            cut: share of the tokens, from 0 to 1.
            removable: number of tokens that can be removed.
            others: number of tokens that cannot be removed.
        """
        if cut == 0:
            return 0
        if self.convention == "paper":
            return min(padded_cut_size(cut, self.padded_length), removable)
        # In floating point 0.07 * 100 is slightly more than 7.
        size = math.ceil(round(cut * removable, 9))
        return min(max(size, 1), removable if others else removable - 1)

    def reason_against(self, removable: int, others: int) -> str | None:
        """Return why an example cannot take part, as words that follow a number; None if it can.

        Args:
            removable: number of its tokens that can be removed.
            others: number of its tokens that cannot be removed.
        """
        if not removable:
            return "without a token that can be removed"
        if others:
            return None
        if removable == 1:
            return "with a single token, without which nothing is left"
        if 0 in self.cuts and self.removal != "mask token":
            return "with no token left for sufficiency at a cut of 0"
        if self.convention == "paper" and max(self.cut_size(cut, removable, others) for cut in self.cuts) == removable:
            return "with no more tokens than the paper's cut takes"
        return None

    def first(self, row: Float64[Tensor, " position"], removable: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the positions of the highest weights, in the order in which sufficiency keeps them.

        That is the order of the tokens in the sentence, or, in the paper's convention, that of a partial sort. The
        earlier of equal weights is ranked first.

        Args:
            row: weight of each token.
            removable: positions that can be removed.
            size: number of positions to return.
        """
        if self.convention == "paper":
            return partly_sorted(row, removable, size, self.padded_length)
        weights = row.numpy()[list(removable)]
        return tuple(sorted(removable[index] for index in np.argsort(-weights, kind="stable")[:size]))


#: The cuts of DeYoung et al. 2020.
ERASER = Perturbation()
#: The cut of the paper's released code.
PAPER = Perturbation(cuts=(PAPER_CUT,), keep_readout=False, convention="paper")


def kept_positions(model: AttentionModel, examples: Sequence[Example], settings: Perturbation) -> list[frozenset[int]]:
    """Return for each example the positions that are never removed: special tokens and, if set, the readout position.

    Args:
        model: the model that predicts.
        examples: examples of any length.
        settings: whether the readout position is kept.

    Raises:
        CallError: The readout position is to be kept, and the model does not read at a single position.
    """
    special = [
        {position for position, is_special in enumerate(example.is_special) if is_special} for example in examples
    ]
    fills_in = not (model.causal or model.classifies)
    if examples and (settings.keep_readout or fills_in):
        try:
            read = model.reading_positions(Batch.of(examples, model.pad)).tolist()
        except CallError as error:
            raise CallError(
                f"{error}; keep_readout=True needs the position at which {model.name} is read: set keep_readout=False "
                f"if there is none"
            ) from error
        for positions, readout in zip(special, read, strict=True):
            positions.add(readout)
    return [frozenset(positions) for positions in special]


def merged(first: Sequence[int], kept: frozenset[int]) -> tuple[int, ...]:
    """Merge the positions that sufficiency keeps with those that are never removed.

    Args:
        first: positions in the order in which sufficiency keeps them.
        kept: positions that are never removed.

    Returns:
        All positions; those that are never removed are where they would be in sorted order, and the others fill the
        remaining entries in the order of `first`.
    """
    following = iter(first)
    return tuple(position if position in kept else next(following) for position in sorted({*first, *kept}))


def keeping(
    example: Example, kept: Sequence[int], removal: Removal, mask_token: int | None
) -> tuple[Example, tuple[int, ...]]:
    """Return the example with only some of its tokens, and the positions in it that the attention mask has to hide.

    Relevance masks and the text are dropped, since the model does not see them.

    Args:
        example: the whole example.
        kept: positions of the tokens to keep; deletion leaves them in this order.
        removal: what happens to the other tokens.
        mask_token: id that replaces them if the removal is "mask token".

    Raises:
        CallError: The removal is "mask token" and there is no mask token.
    """
    special = example.is_special
    if removal == "deletion":
        tokens = tuple(example.tokens[position] for position in kept)
        flags = tuple(special[position] for position in kept)
        types = tuple(example.token_types[position] for position in kept) if example.token_types else ()
        return _bare(example, tokens, flags, types), ()
    seen = set(kept)
    removed = tuple(position for position in range(len(example.tokens)) if position not in seen)
    if removal == "attention mask":
        return _bare(example, example.tokens, special, example.token_types), removed
    if mask_token is None:
        raise CallError("the removal 'mask token' needs a mask token; give mask_token")
    tokens = tuple(token if position in seen else mask_token for position, token in enumerate(example.tokens))
    return _bare(example, tokens, special, example.token_types), ()


def _bare(
    example: Example, tokens: tuple[int, ...], special: tuple[bool, ...], token_types: tuple[int, ...]
) -> Example:
    return Example(
        tokens,
        label=example.label,
        continuations=example.continuations,
        special=special,
        id=example.id,
        token_types=token_types,
    )
