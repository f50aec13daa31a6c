"""How to read a checkpoint or a model, where that is not left to recognition."""

from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from ..architectures.mapping import Mapping
from ..architectures.recognition import Recognised, recognise
from ..checkpoints.finding.in_file import SeriesNames, split_prefix
from ..checkpoints.tensor_file import TensorFile
from ..errors import CallError


@dataclass(frozen=True)
class ReadingOptions:
    """How to read a checkpoint or a model in memory, where that is not left to recognition.

    Attributes:
        mapping: Names the tensors to read. Nothing is recognised then, and no other option but `trust_pickle` may be
            set.
        family: Key of the architecture family, used in place of the one that would be recognised.
        heads: Number of query heads, if neither the config nor the tensor shapes determine it.
        prefix: Prefix of the tensor names, if the file holds them under several prefixes. `{step}` in it stands for
            each of several checkpoints in one file, as in `state_dicts.{step}`.
        trust_pickle: Whether a PyTorch file may run the code that it names while it loads. It has no effect on models
            in memory.
    """

    mapping: Mapping | None = None
    family: str | None = None
    heads: int | None = None
    prefix: str | None = None
    trust_pickle: bool = False

    @property
    def are_given(self) -> bool:
        """Whether any option about the architecture is set."""
        return any(option is not None for option in (self.mapping, self.family, self.heads, self.prefix))

    def stated(self) -> Recognised | None:
        """Return the layers that the mapping names, or None if there is no mapping.

        Raises:
            CallError: `mapping` is not a Mapping, or `family`, `heads` or `prefix` is set beside it.
        """
        if self.mapping is None:
            return None
        if not isinstance(self.mapping, Mapping):
            got = type(self.mapping).__name__
            raise CallError(f"mapping should be a Mapping, as read_mapping(path) returns it, got {got}")
        if replace(self, mapping=None).are_given:
            raise CallError(
                "a mapping states family, prefix and heads itself; state them in the mapping instead of beside it"
            )
        origin = self.mapping.origin.rpartition("[[stacks]] 1 of ")[2]
        return Recognised(f"by {origin}", (self.mapping, *self.mapping.others))

    def recognise(self, file: TensorFile) -> Recognised:
        """Recognise the tensors of a file, as `architectures.recognition.recognise` does with these options."""
        return recognise(file, self.family, self.heads, None if self.prefix is None else split_prefix(self.prefix)[1])

    @property
    def series(self) -> SeriesNames | None:
        """What the options say about several checkpoints in one file: which list holds them, and that of their steps.

        Raises:
            CallError: The prefix has `{step}` within a name.
        """
        if self.mapping is not None:
            return self.mapping.series
        return None if self.prefix is None else SeriesNames(split_prefix(self.prefix)[0])

    def patterns(self, step: str | Sequence[str] | None) -> tuple[str, ...]:
        """Return the patterns for the names of a run that a call states, or else those of the mapping.

        Args:
            step: The pattern, or several, that the call states.

        Raises:
            CallError: The mapping states other patterns.
        """
        stated = () if self.mapping is None else self.mapping.step
        patterns = () if step is None else (step,) if isinstance(step, str) else tuple(step)
        if patterns and stated and patterns != stated:
            raise CallError("the mapping states another pattern for the step; state it in one of the two")
        return patterns or stated

    def settings(self) -> dict[str, Any]:
        """Return the options that decide which values are measured, in a form that JSON can hold."""
        stated = None
        if self.mapping is not None:
            stated = _stated(self.mapping)
            # Stores of older versions have no other stacks among their settings.
            if self.mapping.others:
                stated["stacks"] = [_stated(other) for other in self.mapping.others]
        return {"mapping": stated, "family": self.family, "heads": self.heads, "prefix": self.prefix}


def _stated(mapping: Mapping) -> dict[str, Any]:
    """Return a mapping of one stack in a form that JSON can hold."""
    widths = {"d_head": mapping.heads.d_head, "d_value": mapping.heads.d_value}
    return {
        "tensors": mapping.tensors,
        "layouts": mapping.layouts,
        "heads": mapping.heads.query,
        "prefix": mapping.prefix,
        "facts": mapping.facts.table,
        "scalars": mapping.scalars,
        "stack": mapping.stack,
        # Stores of older versions have no widths among their settings.
        **{name: width for name, width in widths.items() if width is not None},
    }


class ModelKeywords(TypedDict, total=False):
    """The fields of `ReadingOptions` as keywords of a function that reads models in memory."""

    mapping: Mapping | None
    family: str | None
    heads: int | None
    prefix: str | None


class ReadingKeywords(ModelKeywords, total=False):
    """The fields of `ReadingOptions` as keywords of a function that reads checkpoints."""

    trust_pickle: bool


def reading_options(
    options: ReadingOptions | Mapping | None, keywords: Dictionary[str, Any], known: type = ReadingKeywords
) -> ReadingOptions:
    """Return the reading options of a call, which come as one object or as keywords.

    Args:
        options: The options as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        keywords: The options as the keywords of the call.
        known: `ReadingKeywords` or `ModelKeywords`: the keywords that the function takes.

    Raises:
        CallError: A keyword is unknown, both forms are used at once, or `options` has another type.
    """
    names = list(known.__annotations__)
    unknown = [name for name in keywords if name not in names]
    if unknown:
        raise CallError(f"unexpected keyword {unknown[0]!r}; the keywords that say how to read are {', '.join(names)}")
    if isinstance(options, Mapping):
        options, keywords = None, {"mapping": options, **keywords}
    if options is None:
        return ReadingOptions(**keywords)
    if not isinstance(options, ReadingOptions):
        raise CallError(f"options should be ReadingOptions or a Mapping, got {type(options).__name__}")
    if keywords:
        raise CallError(f"options are given beside {', '.join(keywords)}; state everything in one of the two forms")
    return options
