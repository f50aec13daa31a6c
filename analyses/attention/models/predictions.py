"""What a model predicts for many examples: the log-probability of each alternative, in length-bucketed batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from ....circuits.errors import CallError
from ...tasks.example import Example
from .model import AttentionModel, Batch, length_buckets

#: How many examples' predictions are had at once by `each_prediction`.
_AT_ONCE = 256


def predictions(
    model: AttentionModel,
    examples: Sequence[Example],
    *,
    batch_tokens: int = 8192,
    hidden: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Float64[Tensor, "_alternative"]]:
    """Return for each example the log-probability of each of its alternatives.

    Alternatives are the classes of a classifier; for a language model the example's continuations, the probability of
    several tokens being the product of their conditional probabilities, or the whole vocabulary where it has none.
    Probabilities are those of the whole vocabulary, not of the alternatives alone. Inputs that are alike run once, and
    continuations that begin alike share a run.

    Args:
        model: that predicts.
        examples: of any length.
        batch_tokens: at most so many tokens at once, padding counted.
        hidden: for each example positions that the mask hides, besides padding.
        progress: called with how many inputs are done, of how many.

    Raises:
        CallError: an example is longer than the model's context, or has continuations that the model cannot judge.
    """
    if hidden is not None and len(hidden) != len(examples):
        raise CallError(f"expected the hidden positions of {len(examples)} examples, got those of {len(hidden)}")
    runs: dict[tuple, _Run] = {}
    for number, example in enumerate(examples):
        demand_fitting(model, example, number)
        behind = frozenset(hidden[number]) if hidden else frozenset()
        seen = [place for place in range(len(example.tokens)) if place not in behind]
        if not seen:
            raise CallError(f"all tokens of example {example.id or number} are hidden; leave at least one to be seen")
        if model.classifies or not example.continuations:
            _run_of(runs, model, example, behind).wholes.append(number)
            continue
        for alternative, continuation in enumerate(example.continuations):
            run = _run_of(runs, model, continued(example, continuation[:-1]), behind)
            ahead = range(len(example.tokens), len(run.example.tokens))
            run.asked.append(_Asked(number, alternative, (seen[-1], *ahead) if model.causal else None, continuation))
    found: list[Tensor] = [torch.zeros(len(example.continuations), dtype=torch.float64) for example in examples]
    ordered = list(runs.values())
    done = 0
    for bucket in length_buckets([len(run.example.tokens) for run in ordered], batch_tokens):
        with torch.no_grad():
            _answer(model, [ordered[index] for index in bucket], found)
        done += len(bucket)
        if progress is not None:
            progress(done, len(ordered))
    return found


def each_prediction(
    model: AttentionModel, examples: Sequence[Example], *, batch_tokens: int = 8192
) -> Iterator[Float64[Tensor, "_alternative"]]:
    """Yield what `predictions` returns, some examples at a time: each may be as large as the vocabulary."""
    for number, example in enumerate(examples):
        demand_fitting(model, example, number)
    for start in range(0, len(examples), _AT_ONCE):
        yield from predictions(model, examples[start : start + _AT_ONCE], batch_tokens=batch_tokens)


def demand_fitting(model: AttentionModel, example: Example, number: int) -> None:
    """Refuse an example that the model cannot run, or continuations that it cannot judge.

    Raises:
        CallError: it is such an example.
    """
    name = f"example {example.id or number}"
    if any(not continuation for continuation in example.continuations):
        raise CallError(f"{name} has a continuation without tokens; expected at least one in each")
    added = 0
    if not model.classifies and example.continuations:
        added = max(map(len, example.continuations)) - 1
    if added and not model.causal:
        raise CallError(
            f"{name} has a continuation of {added + 1} tokens, and {model.name} predicts one token at its mask; give "
            f"continuations of one token, or a causal language model"
        )
    length = len(example.tokens) + added
    if model.context is not None and length > model.context:
        raise CallError(
            f"{name} has {length} tokens{' with its continuation' if added else ''}, and {model.name} takes at most "
            f"{model.context}; cut it to the context, or leave it out"
        )


def continued(example: Example, tokens: tuple[int, ...]) -> Example:
    """Return an example with tokens behind its own, of which nothing is relevant."""
    if not tokens:
        return example
    return replace(
        example,
        tokens=example.tokens + tokens,
        relevant=(),
        special=example.is_special + (False,) * len(tokens),
        spans=(),
    )


@dataclass(frozen=True)
class _Asked:
    """Of a run, the log-probability of some tokens, each at its place; None for where the model is read."""

    number: int
    alternative: int
    places: tuple[int, ...] | None
    continuation: tuple[int, ...]


@dataclass
class _Run:
    """One input to the model, and what is asked of it: whole distributions, or continuations."""

    example: Example
    hidden: frozenset[int]
    wholes: list[int] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)


def _run_of(runs: dict[tuple, _Run], model: AttentionModel, example: Example, hidden: frozenset[int]) -> _Run:
    # Where tokens say where a prediction is read, which of them are special has a part in it.
    key = (example.tokens, hidden, () if model.classifies or model.causal else example.is_special)
    return runs.setdefault(key, _Run(example, hidden))


def _answer(model: AttentionModel, runs: list[_Run], found: list[Tensor]) -> None:
    batch = Batch.of([run.example for run in runs], model.pad)
    for row, run in enumerate(runs):
        batch.mask[row, list(run.hidden)] = False
    if model.classifies:
        for run, log_probability in zip(runs, _normalised(model.logits(batch.tokens, batch.mask)), strict=True):
            for number in run.wholes:
                found[number] = log_probability
        return
    read = model.reading_positions(batch)
    places = [_places(run, int(position)) for run, position in zip(runs, read, strict=True)]
    most = max(map(len, places))
    padded = torch.tensor([own + own[-1:] * (most - len(own)) for own in places])
    logits = model.logits_at(batch.tokens, batch.mask, padded)
    picks: list[tuple[int, int, int]] = []
    owners: list[tuple[int, int]] = []
    for row, (run, own) in enumerate(zip(runs, places, strict=True)):
        for number in run.wholes:
            found[number] = _normalised(logits[row, own.index(int(read[row]))])
        for asked in run.asked:
            for place, token in zip(asked.places or (int(read[row]),), asked.continuation, strict=True):
                picks.append((row, own.index(place), token))
                owners.append((asked.number, asked.alternative))
    if not picks:
        return
    row, place, token = torch.tensor(picks, device=logits.device).unbind(dim=1)
    chosen = logits[row, place, token].double() - logits.logsumexp(dim=-1)[row, place].double()
    for (number, alternative), value in zip(owners, chosen.tolist(), strict=True):
        found[number][alternative] += value


def _places(run: _Run, read: int) -> list[int]:
    """The positions of a run at which something is asked."""
    wanted = {read} if run.wholes else set()
    for asked in run.asked:
        wanted |= set(asked.places or (read,))
    return sorted(wanted)


def _normalised(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(dim=-1).cpu()
