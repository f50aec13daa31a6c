"""Inputs without some of their tokens: which can go, which go first, how many, and what stands in their place."""

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

#: Shares of the tokens at which DeYoung et al. 2020 cut.
ERASER_CUTS = (0.01, 0.05, 0.1, 0.2, 0.5)

#: `deletion`: the token goes and those behind it move up, in their order. `mask token`: the model's mask token stands
#: in its place. `attention mask`: it keeps its place, and nothing attends to it; but models that count positions by the
#: mask, as OPT and BLOOM do, move up those behind it.
Removal = Literal["deletion", "mask token", "attention mask"]


@dataclass(frozen=True)
class Perturbation:
    """How many tokens are removed, and how.

    Of n tokens that can be removed a cut takes the first k = ceil(share n) of the ranking: at least 1, and at most n,
    or n - 1 where nothing else would be left to the model. A cut of 0 takes none. k does not depend on the removal.

    Attributes:
        cuts: shares, each from 0 to 1.
        removal: what becomes of a token that is removed.
        keep_readout: never remove the token at which the prediction is read, as special tokens never are: a causal
            language model continues its last token, and without that it answers another question. A masked language
            model's mask token is kept in any case.
        convention: `paper` takes k = floor(share * padded_length) of any sequence, and puts the tokens that sufficiency
            keeps in the order that a partial sort leaves them in.
        padded_length: of the paper's sequences; it has no part in the right convention.

    Raises:
        CallError: a setting is out of its range, or the paper's convention is asked to do other than delete.
    """

    cuts: tuple[float, ...] = ERASER_CUTS
    removal: Removal = "deletion"
    keep_readout: bool = True
    convention: Convention = "right"
    padded_length: int = PADDED_LENGTH

    def __post_init__(self) -> None:
        """Refuse settings out of their range."""
        if not self.cuts or len(set(self.cuts)) < len(self.cuts) or not all(0 <= cut <= 1 for cut in self.cuts):
            raise CallError(f"cuts are different shares of the tokens, from 0 to 1; got {self.cuts}")
        if self.removal not in get_args(Removal):
            raise CallError(f"removal should be one of {', '.join(get_args(Removal))}; got {self.removal!r}")
        demand_convention(self.convention)
        if self.padded_length < 1:
            raise CallError(f"padded_length should be at least 1; got {self.padded_length}")
        if self.convention == "paper" and self.removal != "deletion":
            raise CallError(f"the paper's convention deletes tokens; got removal={self.removal!r}")

    def demand_fit(self, model: AttentionModel) -> None:
        """CallError for a model whose tokens cannot be removed so."""
        if self.removal == "mask token" and model.mask_token is None:
            raise CallError(
                f"{model.name} has no mask token to put in a removed token's place; use removal='deletion' or "
                f"'attention mask', or give its adapter the mask token of its tokeniser"
            )

    def cut_size(self, cut: float, removable: int, others: int) -> int:
        """Return how many of the tokens a cut takes.

        Args:
            cut: a share.
            removable: number of tokens that can be removed.
            others: number of tokens that cannot.
        """
        if cut == 0:
            return 0
        if self.convention == "paper":
            return min(padded_cut_size(cut, self.padded_length), removable)
        # A product such as 0.07 * 100 is a little more than it should be.
        size = math.ceil(round(cut * removable, 9))
        return min(max(size, 1), removable if others else removable - 1)

    def reason_against(self, removable: int, others: int) -> str | None:
        """Return why an example cannot take part, in words that stand behind a number; None where it can."""
        if not removable:
            return "without a token that can be removed"
        if others:
            return None
        if removable == 1:
            return "of a single token, without which nothing is left"
        if 0 in self.cuts and self.removal != "mask token":
            return "of which the empty cut keeps nothing"
        if self.convention == "paper" and max(self.cut_size(cut, removable, others) for cut in self.cuts) == removable:
            return "of no more tokens than the paper's cut takes"
        return None

    def first(self, row: Float64[Tensor, " position"], removable: Sequence[int], size: int) -> tuple[int, ...]:
        """Return so many positions of the highest weights, in the order in which sufficiency keeps them.

        Of equal weights those of earlier tokens come first. The order is that of the tokens themselves; under the
        paper's convention that of a partial sort.
        """
        if self.convention == "paper":
            return partly_sorted(row, removable, size, self.padded_length)
        weights = row.numpy()[list(removable)]
        return tuple(sorted(removable[place] for place in np.argsort(-weights, kind="stable")[:size]))


#: As DeYoung et al. 2020 cut.
ERASER = Perturbation()
#: As the released code of the paper cuts.
PAPER = Perturbation(cuts=(PAPER_CUT,), keep_readout=False, convention="paper")


def kept_places(model: AttentionModel, examples: Sequence[Example], settings: Perturbation) -> list[frozenset[int]]:
    """Return for each example the positions that are never removed: special tokens and, if so set, the readout.

    Raises:
        CallError: the readout is to be kept, and the model reads at no single position.
    """
    special = [{place for place, is_special in enumerate(one.is_special) if is_special} for one in examples]
    fills_in = not (model.causal or model.classifies)
    if examples and (settings.keep_readout or fills_in):
        try:
            read = model.reading_positions(Batch.of(examples, model.pad)).tolist()
        except CallError as error:
            raise CallError(
                f"{error}; the token at which {model.name} is read was to be kept: set keep_readout=False if there is "
                f"none"
            ) from error
        for places, readout in zip(special, read, strict=True):
            places.add(readout)
    return [frozenset(places) for places in special]


def merged(first: Sequence[int], kept: frozenset[int]) -> tuple[int, ...]:
    """Return positions of some tokens, in their order, with those that are never removed in their own places."""
    following = iter(first)
    return tuple(place if place in kept else next(following) for place in sorted({*first, *kept}))


def keeping(
    example: Example, kept: Sequence[int], removal: Removal, mask_token: int | None
) -> tuple[Example, tuple[int, ...]]:
    """Return the example with only some of its tokens, and positions that the attention mask has to hide in it.

    What is relevant and which text it was is dropped, for the model does not see it.

    Args:
        example: whole.
        kept: positions; deletion leaves the tokens in the order given.
        removal: what becomes of the other tokens.
        mask_token: stands in their place where that is the removal.
    """
    special = example.is_special
    if removal == "deletion":
        tokens = tuple(example.tokens[place] for place in kept)
        flags = tuple(special[place] for place in kept)
        return _bare(example, tokens, flags), ()
    seen = set(kept)
    away = tuple(place for place in range(len(example.tokens)) if place not in seen)
    if removal == "attention mask":
        return _bare(example, example.tokens, special), away
    if mask_token is None:
        raise CallError("removal by the mask token needs one; give mask_token")
    tokens = tuple(token if place in seen else mask_token for place, token in enumerate(example.tokens))
    return _bare(example, tokens, special), ()


def _bare(example: Example, tokens: tuple[int, ...], special: tuple[bool, ...]) -> Example:
    return Example(tokens, label=example.label, continuations=example.continuations, special=special, id=example.id)
