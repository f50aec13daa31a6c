"""The predictions of a model: the log-probability of each alternative of many examples, in batches by length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from ....circuits.errors import CallError
from ...tasks.example import Example
from .model import AttentionModel, Batch, length_buckets

#: The number of examples that `each_prediction` predicts at once.
_AT_ONCE = 256


def predictions(
    model: AttentionModel,
    examples: Sequence[Example],
    *,
    batch_tokens: int = 8192,
    hidden: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Float64[Tensor, "_alternative"]]:
    """Return the log-probability of each alternative of each example.

    The alternatives of a classifier are its classes. Those of a language model are the example's continuations, or the
    whole vocabulary if it has none; the probability of several tokens is the product of their conditional
    probabilities. Probabilities are those in the whole vocabulary, not those among the alternatives. Equal inputs are
    run once, and continuations with the same beginning share a run.

    Args:
        model: The model that predicts.
        examples: Examples of any length.
        batch_tokens: The maximum number of tokens in a batch, padding included.
        hidden: For each example, the positions that the mask hides besides padding.
        progress: Called with the number of inputs that are done, and with the number of all inputs.

    Raises:
        CallError: An example is longer than the model's context, or has continuations that the model cannot judge.
    """
    if hidden is not None and len(hidden) != len(examples):
        raise CallError(f"expected hidden positions for {len(examples)} examples, got them for {len(hidden)}")
    runs: dict[tuple, _Run] = {}
    for number, example in enumerate(examples):
        demand_fitting(model, example, number)
        masked = frozenset(hidden[number]) if hidden else frozenset()
        seen = [position for position in range(len(example.tokens)) if position not in masked]
        if not seen:
            raise CallError(f"all tokens of example {example.id or number} are hidden; leave at least one visible")
        if model.classifies or not example.continuations:
            _run_of(runs, model, example, masked).wholes.append(number)
            continue
        for alternative, continuation in enumerate(example.continuations):
            run = _run_of(runs, model, continued(example, continuation[:-1]), masked)
            ahead = range(len(example.tokens), len(run.example.tokens))
            positions = (seen[-1], *ahead) if model.causal else None
            run.asked.append(_Asked(number, alternative, positions, continuation))
    results: list[Tensor] = [torch.zeros(len(example.continuations), dtype=torch.float64) for example in examples]
    ordered = list(runs.values())
    done = 0
    for bucket in length_buckets([len(run.example.tokens) for run in ordered], batch_tokens):
        with torch.no_grad():
            _answer(model, [ordered[index] for index in bucket], results)
        done += len(bucket)
        if progress is not None:
            progress(done, len(ordered))
    return results


def each_prediction(
    model: AttentionModel, examples: Sequence[Example], *, batch_tokens: int = 8192
) -> Iterator[Float64[Tensor, "_alternative"]]:
    """Yield the results of `predictions` one by one, since each may be as large as the vocabulary.

    Args:
        model: As in `predictions`.
        examples: As in `predictions`.
        batch_tokens: As in `predictions`.

    Raises:
        CallError: As in `predictions`.
    """
    for number, example in enumerate(examples):
        demand_fitting(model, example, number)
    for start in range(0, len(examples), _AT_ONCE):
        yield from predictions(model, examples[start : start + _AT_ONCE], batch_tokens=batch_tokens)


def demand_fitting(model: AttentionModel, example: Example, number: int) -> None:
    """Refuse an example that the model cannot run, or continuations that it cannot judge.

    Args:
        model: The model.
        example: The example.
        number: The number of the example, for messages.

    Raises:
        CallError: The model cannot answer the example.
    """
    name = f"example {example.id or number}"
    if example.token_types and not model.takes_token_types:
        raise CallError(f"{name} has token types, and {model.name} takes none; leave them out")
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
    """Return an example with tokens added after its own; none of its tokens is marked as relevant.

    Args:
        example: The example.
        tokens: The tokens to add.
    """
    if not tokens:
        return example
    return replace(
        example,
        tokens=example.tokens + tokens,
        relevant=(),
        special=example.is_special + (False,) * len(tokens),
        spans=(),
        in_pair=(),
        token_types=example.token_types + example.token_types[-1:] * len(tokens),
    )


@dataclass(frozen=True)
class _Asked:
    """The tokens of a continuation, whose log-probabilities are taken from a run.

    Attributes:
        number: The number of the example.
        alternative: The number of the continuation.
        positions: The position at which each token is predicted; None for the position at which the model is read.
        continuation: The tokens.
    """

    number: int
    alternative: int
    positions: tuple[int, ...] | None
    continuation: tuple[int, ...]


@dataclass
class _Run:
    """One input to the model, and the results that are taken from it.

    Attributes:
        example: The input.
        hidden: The positions that the mask hides.
        wholes: The numbers of the examples that need the whole distribution.
        asked: The continuations that need the log-probabilities of their tokens.
    """

    example: Example
    hidden: frozenset[int]
    wholes: list[int] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)


def _run_of(runs: dict[tuple, _Run], model: AttentionModel, example: Example, hidden: frozenset[int]) -> _Run:
    # Where the tokens determine the position at which a prediction is read, so does which of them are special.
    special = () if model.classifies or model.causal else example.is_special
    key = (example.tokens, example.token_types, hidden, special)
    return runs.setdefault(key, _Run(example, hidden))


def _answer(model: AttentionModel, runs: list[_Run], results: list[Tensor]) -> None:
    batch = Batch.of([run.example for run in runs], model.pad)
    for row, run in enumerate(runs):
        batch.mask[row, list(run.hidden)] = False
    if model.classifies:
        logits = model.logits(batch.tokens, batch.mask, token_types=batch.token_types)
        for run, log_probability in zip(runs, _normalised(logits), strict=True):
            for number in run.wholes:
                results[number] = log_probability
        return
    read = model.reading_positions(batch)
    positions = [_positions(run, int(position)) for run, position in zip(runs, read, strict=True)]
    most = max(map(len, positions))
    padded = torch.tensor([own + own[-1:] * (most - len(own)) for own in positions])
    logits = model.logits_at(batch.tokens, batch.mask, padded, token_types=batch.token_types)
    picks: list[tuple[int, int, int]] = []
    owners: list[tuple[int, int]] = []
    for row, (run, own) in enumerate(zip(runs, positions, strict=True)):
        for number in run.wholes:
            results[number] = _normalised(logits[row, own.index(int(read[row]))])
        for asked in run.asked:
            for position, token in zip(asked.positions or (int(read[row]),), asked.continuation, strict=True):
                picks.append((row, own.index(position), token))
                owners.append((asked.number, asked.alternative))
    if not picks:
        return
    row, column, token = torch.tensor(picks, device=logits.device).unbind(dim=1)
    chosen = logits[row, column, token].double() - logits.logsumexp(dim=-1)[row, column].double()
    for (number, alternative), value in zip(owners, chosen.tolist(), strict=True):
        results[number][alternative] += value


def _positions(run: _Run, read: int) -> list[int]:
    """Return the positions of a run whose logits are needed."""
    wanted = {read} if run.wholes else set()
    for asked in run.asked:
        wanted |= set(asked.positions or (read,))
    return sorted(wanted)


def _normalised(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(dim=-1).cpu()
