"""Examples: tokens, what is to be predicted, and which of the tokens are relevant for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.errors import CallError

#: A stretch of text: the index of its first character, and the index after its last one.
Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """Tokens of a model's vocabulary, without padding, and the relevance of each of them.

    Attributes:
        tokens: token ids.
        label: the class, the index of the right continuation, or the id of the token to predict; None if unknown.
        relevant: relevance masks over the tokens, one for each annotator; empty if nobody marked anything.
        continuations: token ids of each alternative that a language model chooses among; empty for a classifier.
        special: whether each token was added by the tokenizer or is read by the task itself. Such tokens are neither
            removed nor counted. Empty if there are none.
        text: the text that was tokenized, or the first of two; empty if there is none.
        spans: span of each token in its text; empty if there is no text.
        id: id of the example in its source.
        group: name of the group by which tables may be split, such as the number of attractors.
        cut: number of relevant tokens lost when the text was cut to the model's context.
        pair: the second text of a pair, such as the document to a question; None if there is only one text.
        in_pair: whether each token, and so its span, is of the second text; empty if there is only one.
        token_types: type of each token as the tokenizer gives it, such as 0 for the first text of a pair and 1 for the
            second; empty if the model takes none, or chooses them itself.
        blanks: number of tokens of white space that were put behind the text because the tokenizer puts the space in
            front of the label apart; the label is then the first token behind them. They are special.

    Raises:
        CallError: there are no tokens; a mask, `special`, `spans`, `in_pair` or `token_types` has another length than
            the tokens; or a token type is not a number from 0.
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
    pair: str | None = None
    in_pair: tuple[bool, ...] = ()
    token_types: tuple[int, ...] = ()
    blanks: int = 0

    def __post_init__(self) -> None:
        """Refuse masks whose length differs from that of the tokens."""
        if not self.tokens:
            raise CallError(f"example {self.id or '(without id)'} has no tokens")
        masks = {f"relevance mask {number}": mask for number, mask in enumerate(self.relevant)}
        of_tokens = {name: getattr(self, name) for name in ("special", "spans", "in_pair", "token_types")}
        for name, entries in (masks | of_tokens).items():
            if (entries or name.startswith("relevance")) and len(entries) != len(self.tokens):
                raise CallError(
                    f"{name} of example {self.id or '(without id)'} has length {len(entries)}; expected one entry for "
                    f"each of its {len(self.tokens)} tokens"
                )
        strange = next((kind for kind in self.token_types if not isinstance(kind, int) or kind < 0), None)
        if strange is not None:
            raise CallError(
                f"a token type of example {self.id or '(without id)'} is {strange!r}; expected numbers from 0"
            )

    @property
    def relevance(self) -> Float[Tensor, " token"] | None:
        """The mean of the relevance masks, which weights each token by the share of annotators who marked it.

        Masks in which nothing is marked do not count. If there are no others, the value is None: such an example has no
        relevant tokens and takes no part in measures of relevance.
        """
        marked = [mask for mask in self.relevant if any(mask)]
        return torch.tensor(np.mean(marked, axis=0), dtype=torch.float64) if marked else None

    @property
    def is_special(self) -> tuple[bool, ...]:
        """Whether each token is special."""
        return self.special or (False,) * len(self.tokens)

    def keep(self, positions: Sequence[int]) -> "Example":
        """Return the example with only the tokens at the given positions, in their original order."""
        order = sorted(set(positions))
        return replace(
            self,
            tokens=tuple(self.tokens[position] for position in order),
            relevant=tuple(tuple(mask[position] for position in order) for mask in self.relevant),
            special=tuple(self.special[position] for position in order) if self.special else (),
            spans=tuple(self.spans[position] for position in order) if self.spans else (),
            in_pair=tuple(self.in_pair[position] for position in order) if self.in_pair else (),
            token_types=tuple(self.token_types[position] for position in order) if self.token_types else (),
        )


@dataclass(frozen=True)
class TextExample:
    """A text, or a pair of texts, with the spans that are relevant; `encode` turns it into an `Example`.

    Attributes:
        text: the text that the model is to read, or the first of two.
        label: the class, or the index of the right continuation; None if unknown.
        relevant: the marked spans of characters in the text, for each annotator.
        continuations: the texts that a language model chooses among, including the space in front if there is one.
        id: id of the example in its source.
        group: name of the group by which tables may be split.
        pair: the second text, which a tokenizer of pairs takes as `text_pair`; None if there is only one text.
        pair_relevant: the marked spans of characters in the second text, for each annotator. If either of the two
            texts has no list of annotators, they marked nothing there.

    Raises:
        CallError: a span reaches beyond its text, or ends before it begins; the second text is marked and missing; or
            the texts have different numbers of annotators.
    """

    text: str
    label: int | None = None
    relevant: tuple[tuple[Span, ...], ...] = ()
    continuations: tuple[str, ...] = ()
    id: str = ""
    group: str = ""
    pair: str | None = None
    pair_relevant: tuple[tuple[Span, ...], ...] = ()

    def __post_init__(self) -> None:
        """Refuse spans that do not lie within their text, and marks that do not fit together."""
        name = f"example {self.id or '(without id)'}"
        if self.pair is None and self.pair_relevant:
            raise CallError(f"{name} has marks in a second text and no second text; give it as pair")
        counts = len(self.relevant), len(self.pair_relevant)
        if all(counts) and counts[0] != counts[1]:
            raise CallError(
                f"{name} has marks of {counts[0]} annotators in its text and of {counts[1]} in the second; expected "
                f"one list for each annotator in both"
            )
        parts = (("text", self.text, self.relevant), ("second text", self.pair or "", self.pair_relevant))
        for which, text, annotators in parts:
            for start, end in (span for spans in annotators for span in spans):
                if not 0 <= start <= end <= len(text):
                    raise CallError(
                        f"span {start} to {end} of {name} does not lie within its {which} of {len(text)} characters; "
                        f"expected 0 <= start <= end <= {len(text)}"
                    )

    @property
    def annotators(self) -> int:
        """The number of annotators who marked relevant spans in either text."""
        return max(len(self.relevant), len(self.pair_relevant))


@dataclass(frozen=True)
class Task:
    """Examples of one kind, with the names and bins that reports on them use.

    Attributes:
        name: name of the task.
        examples: the examples, as texts or as tokens.
        relevant: description of the relevant tokens in words.
        classes: names of the classes of a classification; empty for continuations and next tokens.
        attention_bins: edges of the DTAP table's bins of relevant-token attention, from 0 to 1.
        probability_bins: edges of the DTAP table's bins of the right answer's probability, from 0 to 1.
        left_out: reasons for which records of the source were left out, with the number of records for each.
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
        """The examples, if all of them are tokens.

        Raises:
            CallError: an example is a text, which must be encoded first.
        """
        encoded = tuple(example for example in self.examples if isinstance(example, Example))
        if len(encoded) < len(self.examples):
            raise CallError(
                f"{len(self.examples) - len(encoded)} of {len(self.examples)} examples of {self.name} are texts; "
                "expected tokens, so use encode_task with the model's tokenizer first"
            )
        return encoded
