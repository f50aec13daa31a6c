"""Is a ranking of tokens faithful: what the prediction loses without the first of them, and with those alone."""

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
from .perturbation import ERASER, Perturbation, keeping, kept_places, merged

#: The name that rankings drawn at random have among the methods.
RANDOM = "random"
MEASURED = ("comprehensiveness", "sufficiency")


@dataclass(frozen=True)
class Faithfulness:
    """Comprehensiveness and sufficiency of every example, ranking and cut.

    Attributes:
        table: a row for each, with the columns example (its number among those given), id, group, method, order (given,
            or reversed), draw (of the method random; else 0), cut, k (tokens that the cut takes), removable (of so
            many), comprehensiveness and sufficiency.
        settings: how tokens were removed.
        target: whose probability it is.
        left_out: how many examples took no part, by reason.
    """

    table: pd.DataFrame
    settings: Perturbation
    target: Target
    left_out: tuple[tuple[str, int], ...]

    def aopc(self) -> pd.DataFrame:
        """Return for each example, method, order and draw the mean of both over the cuts.

        It is the area over the perturbation curve as ERASER's scorer has it. The formula of DeYoung et al. 2020 divides
        by one more and begins with the cut that takes nothing: that is the mean over `cuts=(0.0, *ERASER_CUTS)`, whose
        first comprehensiveness is 0, and whose first sufficiency is the whole loss.
        """
        keys = ["example", "id", "group", "method", "order", "draw"]
        return self.table.groupby(keys, sort=False)[list(MEASURED)].mean().reset_index()

    def curves(self) -> pd.DataFrame:
        """Return for each method, order and cut the mean over examples, and over draws, of k and of both."""
        return self.table.groupby(["method", "order", "cut"], sort=False)[["k", *MEASURED]].mean().reset_index()

    def summary(self, intervals: Bootstrap = DEFAULT) -> pd.DataFrame:
        """Return for each method, order and measure the mean of `aopc` over examples, with its interval over examples.

        An example's figures at random are the mean over its draws first. Columns: method, order, measure and those of
        `mean_intervals`.
        """
        by_example = self.aopc().pivot_table(
            index="example", columns=["method", "order"], values=list(MEASURED), sort=False
        )
        found = mean_intervals(by_example.to_numpy().T[:, None], intervals)
        names = pd.DataFrame(list(by_example.columns), columns=["measure", "method", "order"])
        return pd.concat([names[["method", "order", "measure"]], found], axis=1)

    def random_band(self) -> pd.DataFrame:
        """Return for each cut the mean, the lowest and the highest of what the random draws give on average."""
        drawn = self.table[self.table["method"] == RANDOM]
        means = drawn.groupby(["cut", "draw"], sort=False)[list(MEASURED)].mean()
        band = means.groupby("cut", sort=False).agg(["mean", "min", "max"])
        names = {"mean": "", "min": "_lowest", "max": "_highest"}
        band.columns = [f"{measure}{names[kind]}" for measure, kind in band.columns]
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
    """Measure rankings of tokens by what the model makes of inputs without them.

    With p the probability of y, and r the k tokens of the highest weights,
        comprehensiveness = p(y | x) - p(y | x without r), high where r is what the prediction was made of;
        sufficiency       = p(y | x) - p(y | r alone),     low where r is enough for it.
    Tokens that are never removed are there in both inputs. Beside each ranking stands the reversed one, by weights of
    the other sign, and random ones.

    Args:
        model: that predicts.
        examples: of any length.
        rows: for each method and example the weights of its tokens, in any unit; of equal ones the earlier goes first.
        settings: how many tokens are removed, and how.
        target: y is what the model finds most probable for the whole input, or the example's label.
        among_alternatives: whether p is the probability among an example's continuations alone, as among the classes of
            a classifier; else it is that in the whole vocabulary.
        draws: how many random rankings each example gets.
        seed: of the draws, which do not depend on the other examples.
        batch_tokens: at most so many tokens at once, padding counted.
        progress: called with how many inputs are done, of how many.

    Raises:
        CallError: the rows are not those of the examples, the model has no such mask token, a label is missing or none
            of the alternatives, or no example can take part.
        QkovError: a weight or a prediction is not finite.

    Source: DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", 2020, section 4.2.
    """
    settings.demand_fit(model)
    demand_target(target)
    if RANDOM in rows:
        raise CallError(
            f"{RANDOM!r} is the name of the rankings drawn here; call the method otherwise, or leave it out"
        )
    for method, given in rows.items():
        demand_rows(method, given, examples)
    if draws < 0:
        raise CallError(f"draws should be 0 or more, got {draws}")
    parts: list[_Part] = []
    reasons: Counter[str] = Counter()
    for number, kept in enumerate(kept_places(model, examples, settings)):
        removable = tuple(place for place in range(len(examples[number].tokens)) if place not in kept)
        reason = settings.reason_against(len(removable), len(kept))
        if reason:
            reasons[reason] += 1
        else:
            parts.append(_Part(number, examples[number], removable, kept))
    if not parts:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise CallError(f"no example can take part{f': left out were {why}' if why else ''}")
    questions = list(_questions(model, parts, target, among_alternatives, batch_tokens))
    inputs = _Inputs(settings, model.mask_token)
    found: list[_Found] = []
    for index, (part, question) in enumerate(zip(parts, questions, strict=True)):
        sizes = [settings.cut_size(cut, len(part.removable), len(part.kept)) for cut in settings.cuts]
        for method, order, draw, row in _rankings(part, rows, draws, seed):
            pairs = {size: inputs.pair(index, part, question.example, row, size) for size in set(sizes)}
            for cut, size in zip(settings.cuts, sizes, strict=True):
                found.append(_Found(index, method, order, draw, cut, size, *pairs[size]))
    answers = predictions(model, inputs.examples, batch_tokens=batch_tokens, hidden=inputs.hidden, progress=progress)
    chosen = [questions[index].alternative for index in inputs.owners]
    probabilities = np.array(
        [probability_of(*one, among_alternatives=among_alternatives) for one in zip(answers, chosen, strict=True)]
    )
    table = _table(parts, np.array([question.probability for question in questions]), probabilities, found)
    if not np.isfinite(table[list(MEASURED)].to_numpy()).all():
        raise QkovError(f"{model.name} gives a probability that is not finite; check the model on the whole examples")
    return Faithfulness(table, settings, target, tuple(reasons.items()))


class _Part(NamedTuple):
    """An example that takes part, its number, and which of its positions can be removed."""

    number: int
    example: Example
    removable: tuple[int, ...]
    kept: frozenset[int]


class _Question(NamedTuple):
    """What is asked about an example: its whole input, which alternative's probability, and that of the whole input."""

    example: Example
    alternative: int
    probability: float


class _Found(NamedTuple):
    """Where the two perturbed inputs of a cut are."""

    part: int
    method: str
    order: str
    draw: int
    cut: float
    size: int
    without: int
    alone: int


class _Inputs:
    """The perturbed inputs; those of an example that keep the same tokens are one."""

    def __init__(self, settings: Perturbation, mask_token: int | None) -> None:
        self.examples: list[Example] = []
        self.hidden: list[tuple[int, ...]] = []
        self.owners: list[int] = []
        self._settings, self._mask_token = settings, mask_token
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def pair(self, owner: int, part: _Part, example: Example, row: Tensor, size: int) -> tuple[int, int]:
        """Return the places of the input without the first tokens, and of that with them alone."""
        first = self._settings.first(row, part.removable, size)
        away = set(first)
        rest = tuple(place for place in range(len(example.tokens)) if place not in away)
        return self._of(owner, example, rest), self._of(owner, example, merged(first, part.kept))

    def _of(self, owner: int, example: Example, kept: tuple[int, ...]) -> int:
        key = (owner, kept)
        if key not in self._known:
            made, hidden = keeping(example, kept, self._settings.removal, self._mask_token)
            self._known[key] = len(self.examples)
            self.examples.append(made)
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
        # The other alternatives need not be asked of the perturbed inputs.
        asked = example.continuations[chosen] if example.continuations else (chosen,)
        yield _Question(replace(example, continuations=(asked,)), 0, probability)


def _rankings(
    part: _Part, rows: Mapping[str, Sequence[Tensor]], draws: int, seed: int
) -> Iterator[tuple[str, str, int, Float64[Tensor, " position"]]]:
    for method, given in rows.items():
        yield method, "given", 0, given[part.number]
        yield method, "reversed", 0, -given[part.number]
    generator = np.random.default_rng((seed, part.number))
    for draw in range(draws):
        yield RANDOM, "given", draw, torch.from_numpy(generator.random(len(part.example.tokens)))


def _table(
    parts: Sequence[_Part],
    whole: Float64[np.ndarray, " part"],
    probabilities: Float64[np.ndarray, " input"],
    found: Sequence[_Found],
) -> pd.DataFrame:
    places = pd.DataFrame(found, columns=list(_Found._fields))
    part = places["part"].to_numpy()
    return pd.DataFrame(
        {
            "example": np.array([one.number for one in parts])[part],
            "id": [parts[index].example.id for index in part],
            "group": [parts[index].example.group for index in part],
            "method": places["method"],
            "order": places["order"],
            "draw": places["draw"],
            "cut": places["cut"],
            "k": places["size"],
            "removable": np.array([len(one.removable) for one in parts])[part],
            "comprehensiveness": whole[part] - probabilities[places["without"].to_numpy()],
            "sufficiency": whole[part] - probabilities[places["alone"].to_numpy()],
        }
    )
