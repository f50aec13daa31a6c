"""MRTA, AC, ACMC and DTAP against numpy, hand-computed cases and scipy's bootstrap of paired samples."""

import numpy as np
import pandas as pd
import pytest
from qkov.analyses.attention import (
    Bootstrap,
    RelevantAttention,
    Thresholds,
    dtap,
    dtap_differences,
    dtap_grid,
    relevance_differences,
    relevance_summary,
)
from qkov.analyses.attention.intervals import EXACT, mean_intervals
from qkov.analyses.attention.relevance.compared_runs import ALL_TOKENS, ELSEWHERE
from qkov.analyses.attention.relevance.relevant_tokens import STANDARD
from qkov.analyses.attention.relevance.summary import DEFINITIONS
from qkov.circuits import CallError
from scipy.stats import bootstrap

FIFTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
QUICK = Bootstrap(resamples=500)


def run(attention, probability=None, chance=None, elsewhere=None, numbers=None):
    count = len(attention)
    columns = {
        "example": range(count) if numbers is None else numbers,
        "attention": attention,
        "chance": np.full(count, 0.25) if chance is None else chance,
        "attention_elsewhere": attention if elsewhere is None else elsewhere,
        "chance_elsewhere": np.full(count, 0.25) if chance is None else chance,
        "probability": np.full(count, np.nan) if probability is None else probability,
    }
    return RelevantAttention(pd.DataFrame(columns), STANDARD, ())


def drawn(count, seed=0):
    generator = np.random.default_rng(seed)
    return run(generator.random(count), generator.random(count), generator.random(count) / 2, generator.random(count))


def value(table, metric, tokens=ALL_TOKENS, column="value"):
    return float(table[(table["metric"] == metric) & (table["tokens"] == tokens)][column].iloc[0])


def test_metrics_by_hand():
    attention = np.array([0.9, 0.6, 0.5, 0.1])
    found = relevance_summary(
        run(attention, np.array([0.9, 0.5, 0.9, 0.9]), np.array([0.6, 0.2, 0.2, 0.6])), settings=QUICK
    )
    assert value(found, "MRTA") == pytest.approx(2.1 / 4)
    # Just a half is not above it.
    assert value(found, "AC") == 0.5
    assert value(found, "ACMC") == 0.25
    assert value(found, "MRTA", column="chance") == pytest.approx(0.4)
    assert value(found, "AC", column="chance") == 0.5
    assert value(found, "ACMC", column="chance") == 0.5
    assert set(found["examples"]) == {4}


def test_thresholds_are_parameters_and_are_in_the_definition():
    attention, probability = np.array([0.9, 0.6, 0.3]), np.array([0.2, 0.9, 0.9])
    found = relevance_summary(run(attention, probability), Thresholds(0.25, 0.1), QUICK)
    assert value(found, "AC") == value(found, "ACMC") == 1.0
    definitions = found.set_index("metric")["definition"]
    assert "above 0.25 and a probability of the right class above 0.1" in definitions["ACMC"].iloc[0]
    assert "this project's reading" in DEFINITIONS["DTAP"]
    assert Thresholds().definition("AC").endswith("above 0.5")


def test_sums_that_are_off_by_rounding_are_where_they_should_be():
    # 0.1 + 0.7 is less than 0.8 in floating point, and 0.1 + 0.2 more than 0.3.
    attention = np.array([0.1 + 0.7, 0.1 + 0.2, 1.0 + 2.3e-16])
    assert attention[0] < 0.8 < 1.0 < attention[2]
    found = dtap(run(attention, np.ones(3)), FIFTHS, (0.0, 1.0), settings=QUICK)
    np.testing.assert_allclose(found.cells["percent"], [0, 100 / 3, 0, 0, 200 / 3], rtol=1e-12)
    assert found.outside == 0
    assert value(
        relevance_summary(run(attention, np.ones(3)), Thresholds(attention=0.3), QUICK), "AC"
    ) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("attention_edges", "probability_edges"),
    [(FIFTHS, FIFTHS), ((0.0, 0.33, 0.66, 1.0),) * 2, ((0.0, 0.1, 0.5, 1.0), (0.2, 0.5, 0.7))],
)
@pytest.mark.parametrize("tokens", [ALL_TOKENS, ELSEWHERE])
def test_the_table_is_numpy_s_histogram(attention_edges, probability_edges, tokens):
    given = drawn(500)
    on_edges = given.table.assign(
        **{name: given.table[name].round(1) for name in ("attention", "attention_elsewhere", "probability", "chance")}
    )
    for table in (given.table, on_edges):
        found = dtap(
            RelevantAttention(table, STANDARD, ()), attention_edges, probability_edges, tokens=tokens, settings=QUICK
        )
        names = ("attention", "chance") if tokens == ALL_TOKENS else ("attention_elsewhere", "chance_elsewhere")
        for column, name in zip(("percent", "chance"), names, strict=True):
            counts, _, _ = np.histogram2d(table[name], table["probability"], [attention_edges, probability_edges])
            np.testing.assert_allclose(found.cells[column], counts.flatten() / 5, atol=1e-12)
            np.testing.assert_allclose(dtap_grid(found.cells, column), np.flipud(counts.T) / 5, atol=1e-12)
        assert found.outside == pytest.approx(100 - found.cells["percent"].sum(), abs=1e-12)
        assert found.examples == 500
    assert found.cells["attention_to"].iloc[-1] == attention_edges[-1]
    assert found.cells["probability_to"].iloc[0] == probability_edges[1]


def test_intervals_are_those_of_the_mean_over_examples():
    given = drawn(200)
    found = relevance_summary(given, settings=QUICK)
    above = (given.table["attention"] > 0.5) & (given.table["probability"] > 0.5)
    for figure, values in (("MRTA", given.table["attention"]), ("ACMC", above)):
        expected = mean_intervals(values.to_numpy(dtype=float)[None, None], QUICK)
        for column in ("value", "low", "high"):
            assert value(found, figure, column=column) == pytest.approx(float(expected[column].iloc[0]), rel=1e-12)
    cells = dtap(given, (0.0, 0.5, 1.0), (0.0, 0.5, 1.0), settings=QUICK).cells
    assert cells["percent"].iloc[-1] == pytest.approx(100 * value(found, "ACMC"))
    assert cells["low"].iloc[-1] == pytest.approx(100 * value(found, "ACMC", column="low"))


def test_an_empty_cell_has_the_exact_interval_of_a_share():
    found = dtap(run(np.full(30, 0.9), np.full(30, 0.9)), (0.0, 0.5, 1.0), (0.0, 1.0), settings=QUICK).cells
    np.testing.assert_allclose(found["percent"], [0, 100], rtol=1e-15)
    np.testing.assert_allclose(found["high"], [100 * (1 - 0.025 ** (1 / 30)), 100], rtol=1e-9)
    np.testing.assert_allclose(found["low"], [0, 100 * 0.025 ** (1 / 30)], rtol=1e-9)
    assert relevance_summary(run(np.full(30, 0.9)), settings=QUICK)["interval"].tolist()[1] == EXACT


def test_seeds_are_averaged_over_the_examples_that_all_have():
    one = run(np.array([0.1, 0.2, 0.9]), numbers=[3, 5, 7])
    other = run(np.array([0.7, 0.4, 0.8]), numbers=[7, 5, 9])
    found = relevance_summary([one, other], settings=QUICK)
    assert value(found, "MRTA") == pytest.approx((0.2 + 0.9 + 0.4 + 0.7) / 4)
    assert set(found["examples"]) == {2}
    assert set(found["runs"]) == {2}
    assert "ACMC" not in set(found["metric"])


def test_examples_with_nothing_elsewhere_are_left_out_there_alone():
    found = relevance_summary(run(np.array([0.1, 0.3, 0.8]), elsewhere=np.array([0.2, np.nan, 0.6])), settings=QUICK)
    assert value(found, "MRTA", ELSEWHERE) == pytest.approx(0.4)
    assert value(found, "MRTA", ELSEWHERE, "examples") == 2
    assert value(found, "MRTA", column="examples") == 3


def test_a_difference_is_of_pairs_and_narrower_than_of_two_samples():
    generator = np.random.default_rng(0)
    hard = generator.random(300) / 2
    one, other = run(hard + 0.3 + generator.random(300) / 50, hard), run(hard + generator.random(300) / 50, hard)
    found = relevance_differences(one, other, settings=Bootstrap(resamples=999))
    pairs = one.table["attention"].to_numpy(), other.table["attention"].to_numpy()
    own = bootstrap(
        pairs,
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        paired=True,
        n_resamples=999,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    np.testing.assert_allclose(
        [value(found, "MRTA", column=column) for column in ("low", "high")], own.confidence_interval, rtol=1e-9
    )
    assert value(found, "MRTA", column="chance") == 0
    assert value(found, "MRTA", column="high") - value(found, "MRTA", column="low") < 0.01
    shuffled = RelevantAttention(other.table.sample(frac=1, random_state=0), STANDARD, ())
    pd.testing.assert_frame_equal(
        relevance_differences(one, shuffled, settings=QUICK), relevance_differences(one, other, settings=QUICK)
    )


def test_differences_of_cells_are_those_of_two_tables():
    one, other = [drawn(50, 0), drawn(50, 1)], [drawn(50, 2), drawn(50, 3)]
    found = dtap_differences(one, other, FIFTHS, FIFTHS, settings=QUICK)
    sides = [dtap(side, FIFTHS, FIFTHS, settings=QUICK).cells for side in (one, other)]
    for column in ("percent", "chance"):
        np.testing.assert_allclose(found.cells[column], sides[0][column] - sides[1][column], atol=1e-12)
    assert found.cells["percent"].sum() == pytest.approx(0, abs=1e-9)
    assert found.outside == 0
    same = relevance_differences(one, one, settings=QUICK)
    assert same[["value", "low", "high"]].abs().to_numpy().max() == 0


def test_two_edges_make_one_bin():
    given = drawn(5)
    cells = dtap(given, (0.0, 1.0), (0.0, 1.0), settings=QUICK).cells
    assert cells["percent"].tolist() == [100.0]
    with pytest.raises(CallError, match="edges of attention should be at least two rising numbers"):
        dtap(given, (0.0,), (0.0, 1.0))


def test_what_cannot_be_tabled_is_refused():
    given = drawn(5)
    with pytest.raises(
        CallError, match=r"edges of attention should be at least two rising numbers; got \(0.0, 0.0, 1.0\)"
    ):
        dtap(given, (0.0, 0.0, 1.0), FIFTHS)
    with pytest.raises(CallError, match="tokens should be one of all tokens, without the readout token; got 'some'"):
        dtap(given, FIFTHS, FIFTHS, tokens="some")
    with pytest.raises(CallError, match="known for none of the examples"):
        dtap(run(np.ones(3)), FIFTHS, FIFTHS)
    with pytest.raises(CallError, match="the runs have no example in common"):
        relevance_summary([given, run(np.ones(2), numbers=[8, 9])])
    with pytest.raises(CallError, match="1 runs cannot be compared with 2"):
        relevance_differences(given, [given, given])
    with pytest.raises(CallError, match="at least one model, got none"):
        relevance_summary([])
