"""Faithfulness of a ranking of tokens: what the prediction loses without its first tokens, and with those alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ...tasks.example import Example
from ..intervals import DEFAULT, Bootstrap, mean_intervals
from ..measures.checks import demand_rows
from ..models.alternatives import Target, demand_target, label_of, probability_of
from ..models.model import AttentionModel
from ..models.predictions import each_prediction, predictions
from .perturbation import ERASER, Perturbation, keeping, kept_positions, merged

#: Name of the method whose rankings are drawn at random.
RANDOM = "random"
#: The metrics of faithfulness.
METRICS = ("comprehensiveness", "sufficiency")


@dataclass(frozen=True)
class Faithfulness:
    """Comprehensiveness and sufficiency of every example, ranking and cut.

    Attributes:
        table: one row for each, with the columns example (its number), id, group, method, order ("given" or
            "reversed"), draw (number of the random ranking; 0 for other methods), cut, k (number of tokens that the cut
            takes), removable (number of tokens that can be removed), comprehensiveness and sufficiency.
        settings: how tokens were removed.
        target: the alternative whose probability was measured.
        left_out: number of examples that took no part, by reason.
    """

    table: pd.DataFrame
    settings: Perturbation
    target: Target
    left_out: tuple[tuple[str, int], ...]

    def aopc(self) -> pd.DataFrame:
        """Return the area over the perturbation curve (AOPC): the mean of both metrics over the cuts.

            AOPC = 1/|B| sum_(b in B) metric at cut b,      B = `settings.cuts`

        This is the AOPC that ERASER's scorer computes. The formula of DeYoung et al. 2020 divides by |B| + 1 and begins
        with a cut that takes nothing; that is the mean over `cuts=(0.0, *ERASER_CUTS)`, whose first comprehensiveness
        is 0 and whose first sufficiency is the whole loss.

        Returns:
            One row for each example, method, order and draw, with the columns example, id, group, method, order, draw,
            comprehensiveness and sufficiency.
        """
        keys = ["example", "id", "group", "method", "order", "draw"]
        return self.table.groupby(keys, sort=False)[list(METRICS)].mean().reset_index()

    def curves(self) -> pd.DataFrame:
        """Return the means over examples and draws of k and of both metrics, for each method, order and cut."""
        return self.table.groupby(["method", "order", "cut"], sort=False)[["k", *METRICS]].mean().reset_index()

    def summary(self, intervals: Bootstrap = DEFAULT) -> pd.DataFrame:
        """Return the mean of `aopc` over examples, with its interval over examples.

        For the random method each example's values are first averaged over its draws.

        Args:
            intervals: how the intervals are drawn.

        Returns:
            One row for each method, order and metric, with the columns method, order, metric, value, low, high,
            examples, runs and interval; see `mean_intervals`.
        """
        by_example = self.aopc().pivot_table(
            index="example", columns=["method", "order"], values=list(METRICS), sort=False
        )
        means = mean_intervals(by_example.to_numpy().T[:, None], intervals)
        names = pd.DataFrame(list(by_example.columns), columns=["metric", "method", "order"])
        return pd.concat([names[["method", "order", "metric"]], means], axis=1)

    def random_band(self) -> pd.DataFrame:
        """Return the mean, the lowest and the highest of the random draws' averages over examples, for each cut."""
        drawn = self.table[self.table["method"] == RANDOM]
        means = drawn.groupby(["cut", "draw"], sort=False)[list(METRICS)].mean()
        band = means.groupby("cut", sort=False).agg(["mean", "min", "max"])
        names = {"mean": "", "min": "_lowest", "max": "_highest"}
        band.columns = [f"{metric}{names[kind]}" for metric, kind in band.columns]
        return band.reset_index()


def faithfulness(
    model: AttentionModel,
    examples: Sequence[Example],
    rows: Mapping[str, Sequence[Float64[Tensor, " _"]]],
    settings: Perturbation = ERASER,
    *,
    target: Target = "predicted",
    among_alternatives: bool = False,
    draws: int = 5,
    seed: int = 0,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> Faithfulness:
    """Measure the faithfulness of rankings of tokens by removing tokens from the model's input.

    With x the whole input, p the probability of y, and r the k tokens of the highest weights,

        comprehensiveness = p(y | x) - p(y | x without r), high if the prediction was based on r;
        sufficiency       = p(y | x) - p(y | r alone),     low if r is enough for the prediction.

    Both are losses of probability, between -1 and 1, computed at each cut (see `Perturbation` for k). Tokens that are
    never removed are present in both inputs. Each ranking is accompanied by the reversed one, by weights of the other
    sign, and by random rankings.

    Args:
        model: the model that predicts.
        examples: examples of any length.
        rows: for each method and example the weight of each token, in any unit; the earlier of equal weights is ranked
            first.
        settings: how many tokens are removed, and how.
        target: y is the alternative that the model finds most probable for the whole input ("predicted"), or the
            example's label ("label").
        among_alternatives: whether p is the probability among an example's continuations alone, as it is among the
            classes of a classifier; otherwise it is the probability in the whole vocabulary.
        draws: number of random rankings of each example.
        seed: seed of the random rankings; those of an example do not depend on the other examples.
        batch_tokens: largest number of tokens in one run of the model, padding included.
        progress: called with the number of inputs that are done and the number of all.

    Returns:
        Both metrics of every example, ranking and cut.

    Raises:
        CallError: The rows do not fit the examples, the model lacks the mask token that the removal needs, a label is
            missing or not among the alternatives, or no example can take part.
        QkovError: A weight or a prediction is not finite.

    Source: DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", 2020, section 4.2.
    """
    settings.demand_fit(model)
    demand_target(target)
    if RANDOM in rows:
        raise CallError(
            f"{RANDOM!r} is the name of the rankings that are drawn here; give the method another name, or leave it out"
        )
    for method, method_rows in rows.items():
        demand_rows(method, method_rows, examples)
    if draws < 0:
        raise CallError(f"draws should be 0 or more, got {draws}")
    parts: list[_Part] = []
    reasons: Counter[str] = Counter()
    for number, kept in enumerate(kept_positions(model, examples, settings)):
        removable = tuple(position for position in range(len(examples[number].tokens)) if position not in kept)
        reason = settings.reason_against(len(removable), len(kept))
        if reason:
            reasons[reason] += 1
        else:
            parts.append(_Part(number, examples[number], removable, kept))
    if not parts:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise CallError(f"no example can take part{f': {why}' if why else ''}")
    questions = list(_questions(model, parts, target, among_alternatives, batch_tokens))
    inputs = _Inputs(settings, model.mask_token)
    pairs: list[_Pair] = []
    for index, (part, question) in enumerate(zip(parts, questions, strict=True)):
        sizes = [settings.cut_size(cut, len(part.removable), len(part.kept)) for cut in settings.cuts]
        for method, order, draw, row in _rankings(part, rows, draws, seed):
            of_size = {size: inputs.pair(index, part, question.example, row, size) for size in set(sizes)}
            for cut, size in zip(settings.cuts, sizes, strict=True):
                pairs.append(_Pair(index, method, order, draw, cut, size, *of_size[size]))
    answers = predictions(model, inputs.examples, batch_tokens=batch_tokens, hidden=inputs.hidden, progress=progress)
    chosen = [questions[index].alternative for index in inputs.owners]
    probabilities = np.array(
        [probability_of(*one, among_alternatives=among_alternatives) for one in zip(answers, chosen, strict=True)]
    )
    table = _table(parts, np.array([question.probability for question in questions]), probabilities, pairs)
    if not np.isfinite(table[list(METRICS)].to_numpy()).all():
        raise QkovError(f"{model.name} gives a probability that is not finite; check the model on the whole examples")
    return Faithfulness(table, settings, target, tuple(reasons.items()))


class _Part(NamedTuple):
    """An example that takes part, its number, and which of its positions can and cannot be removed."""

    number: int
    example: Example
    removable: tuple[int, ...]
    kept: frozenset[int]


class _Question(NamedTuple):
    """An example, the alternative whose probability is measured, and its probability for the whole input."""

    example: Example
    alternative: int
    probability: float


class _Pair(NamedTuple):
    """The indices of the two perturbed inputs of a cut: without its tokens, and with those alone."""

    part: int
    method: str
    order: str
    draw: int
    cut: float
    size: int
    without: int
    alone: int


class _Inputs:
    """The perturbed inputs; inputs of an example that keep the same tokens are stored once."""

    def __init__(self, settings: Perturbation, mask_token: int | None) -> None:
        self.examples: list[Example] = []
        self.hidden: list[tuple[int, ...]] = []
        self.owners: list[int] = []
        self._settings, self._mask_token = settings, mask_token
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def pair(self, owner: int, part: _Part, example: Example, row: Tensor, size: int) -> tuple[int, int]:
        """Return the index of the input without the first tokens, and that of the input with those alone."""
        first = self._settings.first(row, part.removable, size)
        removed = set(first)
        rest = tuple(position for position in range(len(example.tokens)) if position not in removed)
        return self._of(owner, example, rest), self._of(owner, example, merged(first, part.kept))

    def _of(self, owner: int, example: Example, kept: tuple[int, ...]) -> int:
        key = (owner, kept)
        if key not in self._known:
            perturbed, hidden = keeping(example, kept, self._settings.removal, self._mask_token)
            self._known[key] = len(self.examples)
            self.examples.append(perturbed)
            self.hidden.append(hidden)
            self.owners.append(owner)
        return self._known[key]


def _questions(
    model: AttentionModel, parts: Sequence[_Part], target: Target, among_alternatives: bool, batch_tokens: int
) -> Iterator[_Question]:
    answers = each_prediction(model, [part.example for part in parts], batch_tokens=batch_tokens)
    for part, answer in zip(parts, answers, strict=True):
        example = part.example
        chosen = int(answer.argmax()) if target == "predicted" else label_of(example, part.number, len(answer))
        probability = probability_of(answer, chosen, among_alternatives=among_alternatives)
        if model.classifies or (among_alternatives and example.continuations):
            yield _Question(example, chosen, probability)
            continue
        # The probabilities of the other alternatives are not needed for the perturbed inputs.
        continuation = example.continuations[chosen] if example.continuations else (chosen,)
        yield _Question(replace(example, continuations=(continuation,)), 0, probability)


def _rankings(
    part: _Part, rows: Mapping[str, Sequence[Tensor]], draws: int, seed: int
) -> Iterator[tuple[str, str, int, Float64[Tensor, " position"]]]:
    for method, method_rows in rows.items():
        yield method, "given", 0, method_rows[part.number]
        yield method, "reversed", 0, -method_rows[part.number]
    generator = np.random.default_rng((seed, part.number))
    for draw in range(draws):
        yield RANDOM, "given", draw, torch.from_numpy(generator.random(len(part.example.tokens)))


def _table(
    parts: Sequence[_Part],
    whole: Float64[np.ndarray, " part"],
    probabilities: Float64[np.ndarray, " input"],
    pairs: Sequence[_Pair],
) -> pd.DataFrame:
    table = pd.DataFrame(pairs, columns=list(_Pair._fields))
    part = table["part"].to_numpy()
    return pd.DataFrame(
        {
            "example": np.array([one.number for one in parts])[part],
            "id": [parts[index].example.id for index in part],
            "group": [parts[index].example.group for index in part],
            "method": table["method"],
            "order": table["order"],
            "draw": table["draw"],
            "cut": table["cut"],
            "k": table["size"],
            "removable": np.array([len(one.removable) for one in parts])[part],
            "comprehensiveness": whole[part] - probabilities[table["without"].to_numpy()],
            "sufficiency": whole[part] - probabilities[table["alone"].to_numpy()],
        }
    )
