"""Agreement with rationales against scikit-learn, ERASER's definition in a plain loop, and all rankings counted."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from qkov.analyses.attention import Bootstrap, Rationales, plausibility
from qkov.analyses.attention.rationales.plausibility import PLAUSIBILITY_DEFINITIONS
from qkov.analyses.attention.rationales.rationale_overlap import (
    average_precision,
    random_average_precision,
    span_precision_recall,
    spans_of,
    token_f1,
    trapezoid_area,
)
from qkov.analyses.tasks import Example
from qkov.circuits import CallError, QkovError
from sklearn.metrics import auc, average_precision_score, f1_score, precision_recall_curve

QUICK = Bootstrap(resamples=300)


def marks(text):
    return np.array([letter == "x" for letter in text])


def row(*weights):
    return torch.tensor(weights, dtype=torch.float64)


def example(*masks, **more):
    relevant = tuple(tuple(marks(mask).tolist()) for mask in masks)
    return Example(tokens=(1,) * len(masks[0]), relevant=relevant, **more)


def drawn_masks(count, seed=0):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        length = int(generator.integers(2, 30))
        mask = generator.random(length) < generator.random()
        mask[generator.integers(length)] = True
        # Few different weights, so that many tie.
        weights = (
            generator.integers(-3, 4, length) / 3 if generator.random() < 0.5 else generator.standard_normal(length)
        )
        yield weights.astype(float), mask


def test_areas_are_scikit_learn_s():
    for weights, mask in drawn_masks(300):
        assert average_precision(weights, mask) == pytest.approx(average_precision_score(mask, weights), rel=1e-12)
        precision, recall, _ = precision_recall_curve(mask, weights)
        assert trapezoid_area(weights, mask) == pytest.approx(auc(recall, precision), rel=1e-12)


def test_areas_by_hand():
    weights = np.array([4.0, 3.0, 2.0, 1.0])
    assert average_precision(weights, marks("x.x.")) == pytest.approx((1 + 2 / 3) / 2)
    assert trapezoid_area(weights, marks("x.x.")) == pytest.approx(0.5 + 0.5 * (0.5 + 2 / 3) / 2)
    uniform = np.ones(4)
    assert average_precision(uniform, marks("x...")) == 0.25
    # What ties make of the trapezoids: from 1 down to the share of the marked.
    assert trapezoid_area(uniform, marks("x...")) == 0.625


@pytest.mark.parametrize(("tokens", "marked"), [(1, 1), (5, 1), (6, 3), (7, 6), (4, 4)])
def test_the_average_precision_of_random_rankings_is_that_of_all_rankings(tokens, marked):
    mask = np.arange(tokens) < marked
    values = [average_precision(np.array(order, dtype=float), mask) for order in permutations(range(tokens))]
    assert random_average_precision(tokens, marked) == pytest.approx(np.mean(values), rel=1e-12)


def test_token_f1_is_scikit_learn_s():
    for weights, mask in drawn_masks(100, seed=1):
        taken = weights >= weights.max()
        assert token_f1(taken, mask) == pytest.approx(f1_score(mask, taken), rel=1e-12)


def test_spans():
    assert spans_of(marks("x..xxx.x")) == [(0, 1), (3, 6), (7, 8)]
    assert spans_of(marks("....")) == []
    assert spans_of(marks("xxxx")) == [(0, 4)]


def test_spans_agree_from_half_of_their_union_on():
    assert span_precision_recall(marks("xx......"), marks("xxxx...."), 0.5) == (1.0, 1.0)
    assert span_precision_recall(marks("xx......"), marks("xxxxx..."), 0.5) == (0.0, 0.0)
    assert span_precision_recall(marks("xx..x..x"), marks("xx......"), 0.5) == (1 / 3, 1.0)
    assert span_precision_recall(marks("xx......"), marks("xx......"), 1.0) == (1.0, 1.0)


def eraser_spans(mask):
    spans, start = [], None
    for place, mark in enumerate([*mask, False]):
        if mark and start is None:
            start = place
        if not mark and start is not None:
            spans.append(set(range(start, place)))
            start = None
    return spans


@pytest.mark.parametrize("iou", [0.5, 0.7])
def test_a_set_of_examples_against_a_plain_loop_from_eraser_s_definition(iou):
    given = list(drawn_masks(80, seed=2))
    examples = [Example((1,) * len(mask), relevant=(tuple(mask.tolist()),)) for _, mask in given]
    found = plausibility(examples, {"any": [torch.from_numpy(weights) for weights, _ in given]}, Rationales(iou=iou))
    share = sum(mask.sum() / len(mask) for _, mask in given) / len(given)
    assert found.share == pytest.approx(share, rel=1e-12)
    token_f1s, precisions, recalls = [], [], []
    for weights, mask in given:
        k = max(1, math.ceil(share * len(mask)))
        order = sorted(range(len(mask)), key=lambda place, weights=weights: (-weights[place], place))
        taken = set(order[:k])
        marked = {place for place in range(len(mask)) if mask[place]}
        precision, recall = len(taken & marked) / len(taken), len(taken & marked) / len(marked)
        token_f1s.append(2 * precision * recall / (precision + recall) if precision and recall else 0.0)
        ours, theirs = eraser_spans([place in taken for place in range(len(mask))]), eraser_spans(mask)
        right = 0
        for span in ours:
            best = max(len(span & other) / len(span | other) for other in theirs)
            right += best >= iou
        precisions.append(right / len(ours))
        recalls.append(right / len(theirs))
    precision, recall = np.mean(precisions), np.mean(recalls)
    summary = found.summary(QUICK).set_index("metric")
    assert summary["value"]["token F1"] == pytest.approx(np.mean(token_f1s), rel=1e-12)
    assert summary["value"]["IOU F1"] == pytest.approx(2 * precision * recall / (precision + recall), rel=1e-12)
    mixed = [(weights, mask) for weights, mask in given if not mask.all()]
    expected = np.mean([average_precision_score(mask, weights) for weights, mask in mixed])
    assert summary["value"]["average precision"] == pytest.approx(expected, rel=1e-12)
    assert summary["examples"].to_dict() == {
        "token F1": 80,
        "IOU F1": 80,
        "average precision": len(mixed),
        "AUPRC": len(mixed),
    }
    assert len(mixed) < 80
    assert (summary["low"] <= summary["value"]).all()
    assert (summary["value"] <= summary["high"]).all()


def test_several_annotators_are_averaged_or_united():
    given = example("xx..", "x...", "....")
    weights = {"any": [row(4, 3, 2, 1)]}
    mean = plausibility([given], weights).table.iloc[0]
    # k = ceil(3/8 of 4) = 2: against the first 1, against the second 2/3; who marked nothing does not count.
    assert mean["k"] == 2
    assert mean["token_f1"] == pytest.approx((1 + 2 / 3) / 2)
    union = plausibility([given], weights, Rationales(annotators="union"))
    assert (union.share, union.table["token_f1"][0]) == (0.5, 1.0)
    # One of them marked all, and there is nothing to rank against that; k = ceil(5/8 of 4) = 3.
    partly = plausibility([example("xxxx", "x...")], weights).table.iloc[0]
    assert partly["average_precision"] == 1.0
    assert partly["token_f1"] == pytest.approx((6 / 7 + 2 / 4) / 2)


def test_special_tokens_take_no_part():
    given = example("xx.xx", special=(True, False, False, False, True))
    found = plausibility([given], {"any": [row(9, 3, 2, 1, 9)]}, Rationales(share=0.3)).table.iloc[0]
    assert (found["k"], found["tokens"]) == (1, 3)
    assert found["token_f1"] == pytest.approx(2 / 3)
    assert found["average_precision"] == pytest.approx((1 + 2 / 3) / 2)


def test_a_ranking_in_order_of_the_rationale_is_perfect_and_chance_is_below():
    given = [example("xx......"), example(".xx.....")]
    rows = [torch.from_numpy(np.array(one.relevant[0], dtype=float)) for one in given]
    random = [row(*np.random.default_rng(seed).random(8)) for seed in (0, 1)]
    found = plausibility(given, {"perfect": rows, "random": random}).summary(QUICK)
    perfect = found[found["method"] == "perfect"]
    assert perfect["value"].tolist() == [1.0] * 4
    assert set(found["method"]) == {"perfect", "random"}
    assert perfect["metric"].tolist() == list(PLAUSIBILITY_DEFINITIONS)
    chance = perfect.set_index("metric")["chance"]
    assert chance["token F1"] == pytest.approx(0.25)
    assert chance["average precision"] == pytest.approx(random_average_precision(8, 2))
    assert chance[["IOU F1", "AUPRC"]].isna().all()


def test_chance_of_token_f1_is_that_of_random_rankings():
    given = example("xxx..x...", "x........")
    generator = np.random.default_rng(0)
    rows = {str(draw): [torch.from_numpy(generator.random(9))] for draw in range(1000)}
    table = plausibility([given], rows, Rationales(share=0.3)).table
    for column in ("token_f1", "average_precision"):
        error = table[column].std() / np.sqrt(1000)
        assert abs(table[column].mean() - table[f"{column}_chance"][0]) < 4 * error


def test_examples_without_a_rationale_are_left_out_and_counted():
    given = [example("...."), example("x..."), Example((1, 1)), Example((1,), cut=1)]
    weights = [row(*range(len(one.tokens))) for one in given]
    found = plausibility(given, {"any": weights})
    assert found.table["example"].tolist() == [1]
    assert found.left_out == (("without a relevant token", 2), ("whose relevant tokens were cut off", 1))
    with pytest.raises(CallError, match="compared with a rationale: 1 without a relevant token"):
        plausibility(given[:1], {"any": weights[:1]})


def test_nothing_agrees_and_no_warning_comes():
    found = plausibility([example("x..."), example("x...")], {"any": [row(1, 2, 3, 4)] * 2}, Rationales(share=0.25))
    summary = found.summary(QUICK).set_index("metric")
    assert summary["value"]["IOU F1"] == summary["value"]["token F1"] == 0.0
    assert summary["high"]["IOU F1"] == 0.0


def test_where_all_is_marked_there_is_nothing_to_rank():
    found = plausibility([example("xxx")], {"any": [row(1, 2, 3)]}).summary(QUICK).set_index("metric")
    assert found["value"]["token F1"] == found["value"]["IOU F1"] == found["chance"]["token F1"] == 1.0
    assert found["value"][["average precision", "AUPRC"]].isna().all()
    assert found["examples"][["average precision", "AUPRC"]].tolist() == [0, 0]


def test_wrong_calls_are_refused():
    given, weights = [example("x...")], [row(1, 2, 3, 4)]
    for share in (0.0, 1.5, 5.0):
        with pytest.raises(CallError, match=f"share is a share of the tokens, above 0 and at most 1; got {share}"):
            Rationales(share=share)
    for iou in (0.2, 0.49, 1.2):
        with pytest.raises(CallError, match=f"iou is a share, from 0.5 to 1; got {iou}"):
            Rationales(iou=iou)
    assert Rationales(share=1.0, iou=1.0).iou == 1
    assert Rationales().iou == 0.5
    with pytest.raises(CallError, match="at least one method, got none"):
        plausibility(given, {})
    with pytest.raises(CallError, match="flow has rows for 2 examples; expected 1"):
        plausibility(given, {"flow": weights * 2})
    with pytest.raises(CallError, match="the row of flow for example 0 has 3 weights; expected one for each of its 4"):
        plausibility(given, {"flow": [row(1, 2, 3)]})
    with pytest.raises(QkovError, match="a weight of flow for example 0 is not finite"):
        plausibility(given, {"flow": [row(1, 2, math.inf, 3)]})
