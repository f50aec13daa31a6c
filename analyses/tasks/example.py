"""One example: tokens, what is to be predicted, and which of the tokens matter for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.errors import CallError

#: A stretch of text, from a character to the one before another.
Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """Tokens of a model's vocabulary, without padding, and what of them is relevant.

    Attributes:
        tokens: ids.
        label: the class, or which of the continuations is the right one; None where nothing is known to be right.
        relevant: any number of masks over the tokens, one for each annotator; none where nobody marked anything.
        continuations: token ids of each alternative that a language model chooses among; empty for a classifier.
        special: tokens that the tokeniser added, which are neither removed nor counted.
        text: that the tokens stand for; empty where there is none.
        spans: of each token in the text; empty where there is none.
        id: of the example in its source.
        group: by which tables may be split, such as the number of attractors.
        cut: how many relevant tokens were lost as the text was cut to the model's context.

    Raises:
        CallError: a mask, the special tokens or the spans are not as long as the tokens, or there are no tokens.
    """

    tokens: tuple[int, ...]
    label: int | None = None
    relevant: tuple[tuple[bool, ...], ...] = ()
    continuations: tuple[tuple[int, ...], ...] = ()
    special: tuple[bool, ...] = ()
    text: str = ""
    spans: tuple[Span, ...] = ()
    id: str = ""
    group: str = ""
    cut: int = 0

    def __post_init__(self) -> None:
        """Refuse masks of another length than the tokens."""
        if not self.tokens:
            raise CallError(f"example {self.id or '(without id)'} has no tokens")
        masks = {f"relevance mask {number}": mask for number, mask in enumerate(self.relevant)}
        for name, given in (*masks.items(), ("special", self.special), ("spans", self.spans)):
            if (given or name.startswith("relevance")) and len(given) != len(self.tokens):
                raise CallError(
                    f"{name} of example {self.id or '(without id)'} has length {len(given)}; expected one entry for "
                    f"each of its {len(self.tokens)} tokens"
                )

    @property
    def relevance(self) -> Float[Tensor, " token"] | None:
        """The mean of the masks, which weights each token by the share of annotators who marked it.

        Masks in which nothing is marked do not count; None where that is all of them: such an example has no relevant
        tokens and takes no part in measures of relevance.
        """
        marked = [mask for mask in self.relevant if any(mask)]
        return torch.tensor(np.mean(marked, axis=0), dtype=torch.float64) if marked else None

    @property
    def is_special(self) -> tuple[bool, ...]:
        """For every token, whether the tokeniser added it."""
        return self.special or (False,) * len(self.tokens)

    def keep(self, positions: Sequence[int]) -> "Example":
        """Return the example with only the tokens at those positions, in their own order."""
        order = sorted(set(positions))
        return replace(
            self,
            tokens=tuple(self.tokens[place] for place in order),
            relevant=tuple(tuple(mask[place] for place in order) for mask in self.relevant),
            special=tuple(self.special[place] for place in order) if self.special else (),
            spans=tuple(self.spans[place] for place in order) if self.spans else (),
        )


@dataclass(frozen=True)
class TextExample:
    """A text, and which stretches of it matter; it becomes an `Example` by a tokeniser.

    Attributes:
        text: as the model is to read it.
        label: as of `Example`.
        relevant: for each annotator the spans of characters that were marked.
        continuations: the texts that a language model chooses among, with the space in front where there is one.
        id: of the example in its source.
        group: by which tables may be split.

    Raises:
        CallError: a span reaches beyond the text, or ends before it begins.
    """

    text: str
    label: int | None = None
    relevant: tuple[tuple[Span, ...], ...] = ()
    continuations: tuple[str, ...] = ()
    id: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        """Refuse spans that are none of the text."""
        for start, end in (span for spans in self.relevant for span in spans):
            if not 0 <= start <= end <= len(self.text):
                raise CallError(
                    f"span {start} to {end} of example {self.id or '(without id)'} is none of its text, which has "
                    f"{len(self.text)} characters; expected 0 <= start <= end <= {len(self.text)}"
                )


@dataclass(frozen=True)
class Task:
    """Examples of one kind, and how they are spoken of.

    Attributes:
        name: of the task.
        examples: of text or of tokens.
        relevant: what the relevant tokens are, in words.
        classes: names of the classes of a classification; empty for continuations and next tokens.
        attention_bins, probability_bins: edges of the DTAP table, from 0 to 1.
        left_out: how many records of the source were left out, by reason.
    """

    name: str
    examples: tuple[Example | TextExample, ...]
    relevant: str
    classes: tuple[str, ...] = ()
    attention_bins: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    probability_bins: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    left_out: tuple[tuple[str, int], ...] = ()

    @property
    def in_tokens(self) -> tuple[Example, ...]:
        """The examples, once all of them are tokens.

        Raises:
            CallError: one is a text, which a tokeniser has to encode first.
        """
        encoded = tuple(example for example in self.examples if isinstance(example, Example))
        if len(encoded) < len(self.examples):
            raise CallError(
                f"{len(self.examples) - len(encoded)} of {len(self.examples)} examples of {self.name} are texts; "
                f"expected tokens: use encode_task with the model's tokeniser"
            )
        return encoded
