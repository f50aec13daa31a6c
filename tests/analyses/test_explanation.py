"""Explanations: tables of one set of examples, held against sums written out here; files that are whole or none."""

from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.attention import (
    PAPER,
    Batch,
    Explanation,
    ExplanationSettings,
    explain,
    read_explanation,
    write_explanation,
)
from qkov.analyses.attention.explanation import files as explanation_files
from qkov.analyses.attention.explanation.files import is_explanation
from qkov.analyses.attention.explanation.rows import MethodRows
from qkov.analyses.attention.explanation.tables import token_table
from qkov.analyses.attention.measures.paper_readout import PaperReadout
from qkov.analyses.attention.models.alternatives import answers
from qkov.analyses.attention.rationales.attribution import quick_methods
from qkov.analyses.tasks import Example, Task
from qkov.circuits import CallError, QkovError

from .task_texts import label
from .tiny_models import CAUSAL
from .toy_attention import ToyAttention, batch_of, kept_maps
from .word_tokens import word_tokeniser

FEW = ("rollout", "input x gradient", "random")
LENGTHS = (6, 4, 7, 5, 6)


def toy_task(with_relevant=True, **changes):
    """Sequences whose second token is relevant, but for the last one of all, of which nobody marked anything."""
    made = []
    for number, example in enumerate(batch_of(*LENGTHS).examples):
        mask = tuple(place == 1 for place in range(len(example.tokens)))
        relevant = (mask,) if with_relevant and number < len(LENGTHS) - 1 else ()
        made.append(replace(example, label=number % 3, relevant=relevant, id=f"e{number}"))
    return Task(name="toy", examples=tuple(made), relevant="the second token", classes=("a", "b", "c"), **changes)


@pytest.fixture(scope="module")
def toy():
    return explain(ToyAttention(), toy_task(left_out=(("without a label", 3),)), ExplanationSettings(methods=FEW))


def test_examples_say_what_the_model_makes_of_them(toy):
    model, task = ToyAttention(), toy_task()
    for row, example in zip(toy.examples.to_dict("records"), task.in_tokens, strict=True):
        tokens = torch.tensor([example.tokens])
        probabilities = model.logits(tokens, torch.ones_like(tokens, dtype=torch.bool))[0].softmax(dim=0)
        best = int(probabilities.argmax())
        assert row["predicted"] == best
        assert row["answer"] == "abc"[best]
        assert row["right_answer"] == "abc"[label(example)]
        assert row["correct"] == (best == example.label)
        assert row["probability"] == pytest.approx(float(probabilities[best]), abs=1e-12)
        assert row["right"] == pytest.approx(float(probabilities[example.label]), abs=1e-12)
        assert row["tokens"] == len(example.tokens)
        assert row["relevant_tokens"] == len(example.relevant)


def test_attention_on_relevant_tokens_is_the_rollouts(toy):
    model = ToyAttention()
    expected = []
    for example in toy_task().in_tokens[:-1]:
        product = torch.eye(len(example.tokens), dtype=torch.float64)
        for attention in kept_maps(model, Batch.of([example], model.pad)):
            product = (attention[0].mean(dim=0) / 2 + torch.eye(len(product)) / 2) @ product
        expected.append(float(product[-1, 1]))
    np.testing.assert_allclose(toy.examples["attention"][:-1], expected, rtol=1e-10)
    np.testing.assert_allclose(toy.examples["chance"][:-1], [1 / length for length in LENGTHS[:-1]])
    assert np.isnan(toy.examples["attention"].iloc[-1])
    row = toy.relevance.query("method == 'rollout' and metric == 'MRTA' and tokens == 'all tokens'").iloc[0]
    assert row["value"] == pytest.approx(np.mean(expected))
    assert row["examples"] == len(LENGTHS) - 1
    assert toy.description["left_out"] == {
        "task": {"without a label": 3},
        "relevance": {"without a relevant token": 1},
        "faithfulness": {},
    }


def test_cells_count_the_examples_once(toy):
    known = toy.examples.dropna(subset="attention")
    edges = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    expected, _, _ = np.histogram2d(known["attention"], known["right"], bins=(edges, edges))
    cells = toy.dtap.pivot(index="attention_from", columns="probability_from", values="percent")
    np.testing.assert_allclose(cells, 100 * expected / len(known))


def test_tokens_carry_the_weights_of_every_method(toy):
    assert len(toy.tokens) == sum(LENGTHS)
    of_one = toy.tokens[toy.tokens["example"] == 2]
    assert of_one["rollout"].sum() == pytest.approx(1)
    assert of_one["relevance"].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert of_one["readout"].tolist() == [False] * 6 + [True]
    assert of_one["written"].tolist() == [str(token) for token in of_one["token"]]
    # For what is predicted: the sum over a token's embedding of gradient and embedding.
    example = toy_task().in_tokens[2]
    model, tokens = ToyAttention(), torch.tensor([example.tokens])
    embedded = model.embed(tokens).requires_grad_()
    logits = model.logits(tokens, torch.ones_like(tokens, dtype=torch.bool), embedded=embedded)
    logits.log_softmax(dim=-1)[0].max().backward()
    assert embedded.grad is not None
    np.testing.assert_allclose(of_one["input x gradient"], (embedded.grad * embedded.detach())[0].sum(dim=-1))


def test_the_table_of_methods_is_of_means_over_examples(toy):
    table = toy.methods.set_index(["method", "metric"])["value"]
    given = toy.faithfulness.query("order == 'given'")
    for method in FEW:
        for measure in ("comprehensiveness", "sufficiency"):
            assert table[method, measure] == pytest.approx(given[given["method"] == method][measure].mean())
    beyond = table["rollout", "sufficiency beyond random"]
    assert beyond == pytest.approx(table["rollout", "sufficiency"] - table["random", "sufficiency"])
    assert ("random", "sufficiency beyond random") not in table
    positive = toy.tokens.assign(weight=toy.tokens["input x gradient"].clip(lower=0))
    masses = [
        rows.loc[rows["relevance"] > 0, "weight"].sum() / rows["weight"].sum()
        for _, rows in positive[positive["example"] < len(LENGTHS) - 1].groupby("example")
    ]
    assert table["input x gradient", "mass on relevant tokens"] == pytest.approx(np.mean(masses))
    band = toy.curves.query("method == 'random'")
    assert (band["sufficiency_lowest"] <= band["sufficiency"]).all()
    assert (band["sufficiency"] <= band["sufficiency_highest"]).all()


def test_the_whole_examples_run_once_for_the_maps_and_a_few_times_in_all():
    model = ToyAttention()
    runs, logits = [], model.logits

    def counted(tokens, mask, **options):
        runs.append(options.get("maps") is not None)
        return logits(tokens, mask, **options)

    model.logits = counted
    explain(model, toy_task(), ExplanationSettings(methods=("rollout", "last layer", "layer mean", "value norms")))
    assert sum(runs) == 1
    # Predictions here and in faithfulness, and the perturbed inputs.
    assert len(runs) == 4


def test_every_method_has_its_metrics():
    explanation = explain(ToyAttention(), toy_task(), ExplanationSettings(methods=quick_methods(), resamples=99))
    metrics = explanation.methods.groupby("method")["metric"].agg(set)
    assert set(metrics.index) == set(quick_methods())
    assert metrics["value norms"] >= {"comprehensiveness", "sufficiency", "average precision"}
    assert len(explanation.heads) == 12


def test_without_relevant_tokens_rankings_alone_are_judged():
    explanation = explain(ToyAttention(), toy_task(with_relevant=False), ExplanationSettings(methods=FEW))
    assert explanation.relevance.empty
    assert explanation.dtap.empty
    assert explanation.heads.empty
    assert explanation.description["left_out"]["relevance"] == {"without a relevant token": len(LENGTHS)}
    assert set(explanation.methods["metric"]) == {
        "comprehensiveness",
        "sufficiency",
        "comprehensiveness beyond random",
        "sufficiency beyond random",
    }


def test_probabilities_are_among_the_continuations_where_every_example_has_some():
    model = CAUSAL[0].adapted()
    pair = Example((11, 12, 13), label=1, continuations=((21,), (22,)), relevant=((True, False, False),))
    others = (replace(pair, tokens=(14, 12, 15)), replace(pair, tokens=(16, 11), relevant=()))
    task = Task(name="pairs", examples=(pair, *others), relevant="r")
    explanation = explain(model, task, ExplanationSettings(methods=FEW), tokeniser=word_tokeniser())
    logits = model.logits(torch.tensor([pair.tokens]), torch.ones(1, 3, dtype=torch.bool))[0, -1].detach()
    two = logits[[21, 22]].double().softmax(dim=0)
    first = explanation.examples.iloc[0]
    assert first["right"] == pytest.approx(float(two[1]), abs=1e-6)
    assert first["probability"] == pytest.approx(float(two.max()), abs=1e-6)
    assert first["right_answer"] == word_tokeniser().decode([22])
    assert explanation.description["probability"] == "continuations"
    found = answers(model, task, among_alternatives=False)
    assert found.right[0] == pytest.approx(float(logits.double().softmax(dim=0)[22]), abs=1e-6)


def test_the_papers_convention_reads_padded_sequences_and_counts_examples_without_relevant_tokens():
    model, task = ToyAttention(), toy_task()
    readout = PaperReadout(pad_mask=False, padded_length=9)
    settings = ExplanationSettings(methods=FEW, perturbation=PAPER, paper_readout=readout)
    explanation = explain(model, task, settings)
    rows = readout.rows(model, readout.batch(task.in_tokens, model.pad))
    np.testing.assert_allclose(explanation.examples["attention"][:-1], rows[:-1, 1])
    assert explanation.examples["attention"].iloc[-1] == 0
    assert explanation.description["settings"]["convention"] == "paper"
    assert explanation.faithfulness["cut"].unique().tolist() == [0.05]


@pytest.mark.parametrize(("pad_mask", "length"), [(False, 9), (True, 7), (True, 6)])
def test_uniform_attention_is_at_chance_in_the_papers_convention_too(pad_mask, length):
    model = ToyAttention(layers=1)
    model.blocks[0]["W_Q"].zero_()
    readout = PaperReadout(pad_mask=pad_mask, padded_length=length)
    settings = ExplanationSettings(methods=FEW, perturbation=PAPER, paper_readout=readout)
    explanation = explain(model, toy_task(), settings)
    # The second token of as many as are seen; of a sequence without padding the paper reads at the first.
    seen = [length if not pad_mask else 0 if tokens >= length else tokens for tokens in LENGTHS[:-1]]
    expected = [1 / tokens if tokens else 0.0 for tokens in seen] + [0.0]
    np.testing.assert_allclose(explanation.examples["attention"], expected, rtol=1e-12)
    np.testing.assert_allclose(explanation.examples["chance"], expected, rtol=1e-12)
    mean = explanation.relevance.query("metric == 'MRTA' and method == 'rollout' and tokens == 'all tokens'")
    np.testing.assert_allclose(mean[["value", "chance"]], [[np.mean(expected)] * 2], rtol=1e-12)


def test_a_model_of_other_classes_is_refused():
    two = replace(toy_task(), classes=("a", "b"))
    with pytest.raises(CallError, match="toy has 3 classes, and toy has 2 \\(a, b\\)"):
        explain(ToyAttention(), two, ExplanationSettings(methods=FEW))


def test_a_label_is_needed_to_explain_it():
    task = replace(toy_task(), examples=tuple(replace(one, label=None) for one in toy_task().in_tokens))
    with pytest.raises(CallError, match="example e0 has no label"):
        explain(ToyAttention(), task, ExplanationSettings(methods=FEW, target="label"))
    explanation = explain(ToyAttention(), task, ExplanationSettings(methods=FEW))
    assert explanation.examples["correct"].isna().all()
    assert explanation.dtap.empty
    assert set(explanation.relevance["metric"]) == {"MRTA", "AC"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ("rollout", "magic")}, "there is no method 'magic'; expected some of integrated gradients"),
        ({"methods": ("rollout", "rollout")}, "named twice"),
        ({"methods": ("random", "rollout")}, "expected an attention measure"),
        ({"methods": ()}, "expected an attention measure"),
        ({"perturbation": PAPER}, "read in the standard convention, but tokens are removed in the paper convention"),
        ({"draws": 0}, "random"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, said):
    with pytest.raises(CallError, match=said):
        ExplanationSettings(**changes)


def test_files_hold_what_was_measured(toy, tmp_path):
    write_explanation(toy, tmp_path / "out")
    again = read_explanation(tmp_path / "out")
    assert again.description == toy.description
    for field in fields(Explanation):
        if field.name != "description":
            pd.testing.assert_frame_equal(getattr(again, field.name), getattr(toy, field.name))


def test_tables_that_are_half_written_are_no_explanation(toy, tmp_path, monkeypatch):
    write_explanation(toy, tmp_path)
    written = []

    def broken(path, content):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        path.write_bytes(content)

    monkeypatch.setattr(explanation_files, "write_atomically", broken)
    with pytest.raises(KeyboardInterrupt):
        write_explanation(toy, tmp_path)
    assert not is_explanation(tmp_path)
    with pytest.raises(CallError, match="holds no explanation"):
        read_explanation(tmp_path)


def test_damaged_files_are_named(toy, tmp_path):
    write_explanation(toy, tmp_path)
    (tmp_path / "heads.parquet").write_bytes(b"no table")
    with pytest.raises(QkovError, match=r"cannot be read .* run qkov explain again"):
        read_explanation(tmp_path)
    (tmp_path / "heads.parquet").unlink()
    with pytest.raises(QkovError, match="cannot be read"):
        read_explanation(tmp_path)
    write_explanation(toy, tmp_path)
    (tmp_path / "explanation.json").write_text('{"format": "another"}')
    with pytest.raises(CallError, match="written by another version"):
        read_explanation(tmp_path)


def test_tokens_are_listed_with_what_is_known_of_each():
    marked = Example((5, 6, 7), relevant=((False, True, True), (False, True, False)), spans=((0, 2), (2, 3), (4, 9)))
    plain = Example((6, 8), special=(True, False))
    rows = MethodRows(
        {"a": [torch.tensor([0.25, 0.5, 0.25]).double(), torch.tensor([0.75, 0.25]).double()]}, [2, 0], None
    )
    table = token_table([marked, plain], rows, lambda tokens: f"<{tokens[0]}>")
    assert table["example"].tolist() == [0, 0, 0, 1, 1]
    assert table["position"].tolist() == [0, 1, 2, 0, 1]
    assert table["written"].tolist() == ["<5>", "<6>", "<7>", "<6>", "<8>"]
    assert list(zip(table["start"], table["end"], strict=True)) == [(0, 2), (2, 3), (4, 9), (-1, -1), (-1, -1)]
    assert table["special"].tolist() == [False, False, False, True, False]
    assert table["relevance"].tolist() == [0, 1, 0.5, 0, 0]
    assert table["readout"].tolist() == [False, False, True, True, False]
    assert table["a"].tolist() == [0.25, 0.5, 0.25, 0.75, 0.25]
    assert table["in_pair"].tolist() == [False] * 5
    assert table["token_type"].isna().all()


def test_rows_of_tables_have_numbers_of_their_own(toy):
    for table in (toy.examples, toy.tokens, toy.methods, toy.curves):
        assert table.index.tolist() == list(range(len(table)))
