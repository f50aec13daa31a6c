"""The registry of attention measures: one entry makes a measure a method, and settings reach every measure."""

from dataclasses import replace

import pytest
import torch
from qkov.analyses.attention import MEASURES, METHODS, ExplanationSettings, Measure, MeasureSettings, Rollout, explain
from qkov.analyses.attention.explanation.rows import method_rows
from qkov.analyses.attention.measures.shared_run import SharedRun
from qkov.analyses.attention.rationales.attribution import all_methods, quick_methods
from qkov.analyses.attention.rationales.attribution_methods import ATTRIBUTION_METHODS
from qkov.analyses.tasks import Task
from qkov.circuits import CallError

from .toy_attention import ToyAttention, batch_of

#: For each setting that a measure can use, settings that differ from the default ones in it alone.
CHANGED = {
    "residual": MeasureSettings(Rollout(residual=0.2)),
    "heads": MeasureSettings(Rollout(heads="max")),
    "discard": MeasureSettings(Rollout(discard=0.4)),
    "layers": MeasureSettings(Rollout(layers=range(1, 3))),
    "target": MeasureSettings(target="label"),
}


def unlikely(model, batch):
    """The batch with the least probable class of each example as its label."""
    classes = model.logits(batch.tokens, batch.mask).argmin(dim=-1).tolist()
    examples = tuple(replace(one, label=label) for one, label in zip(batch.examples, classes, strict=True))
    return replace(batch, examples=examples)


@pytest.mark.parametrize("setting", CHANGED)
@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_changes_with_the_settings_that_it_uses_and_with_no_other(name, setting):
    model = ToyAttention()
    batch = unlikely(model, batch_of(6, 7))
    measure = MEASURES[name]
    assert measure.uses <= set(CHANGED)
    default, changed = measure(model, batch), measure(model, batch, CHANGED[setting])
    assert torch.allclose(default, changed, rtol=1e-6, atol=1e-9) != (setting in measure.uses)


@pytest.mark.parametrize("setting", ["residual", "heads", "discard", "layers"])
def test_the_settings_of_an_explanation_reach_every_measure(setting):
    model, examples = ToyAttention(), batch_of(6, 7).examples
    rollout = CHANGED[setting].rollout
    settings = ExplanationSettings(methods=tuple(MEASURES), rollout=rollout)
    rows = method_rows(model, examples, [0, 1], settings, lambda *_: None, progress=lambda *_: None).rows
    plain = replace(settings, rollout=Rollout())
    before = method_rows(model, examples, [0, 1], plain, lambda *_: None, progress=lambda *_: None).rows
    for name, measure in MEASURES.items():
        same = all(torch.allclose(one, other) for one, other in zip(rows[name], before[name], strict=True))
        assert same != (setting in measure.uses), name


def toy_rows(model, batch, settings):
    """Weights that are the residual share, so that a test sees which settings came."""
    return torch.where(batch.mask, settings.rollout.residual, 0.0).double()


@pytest.fixture
def registered():
    """Toy measures, one that runs alone and one that shares a run, registered for one test."""

    def stream(run: SharedRun):
        layers = []
        run.watch(lambda layer, _attention: layers.append(layer))
        return lambda: torch.where(run.batch.mask, run.rollout.residual_of(0) * len(layers), 0.0).double()

    alone = Measure("toy", toy_rows, frozenset({"residual"}), "this test")
    shared = Measure("shared toy", toy_rows, frozenset({"residual"}), "this test", streamed=stream, quick=False)
    for measure in (alone, shared):
        MEASURES.add(measure)
    yield alone, shared
    for measure in (alone, shared):
        del MEASURES[measure.name]


def test_a_registered_measure_is_a_method_of_explain_and_takes_the_settings(registered):
    assert {"toy", "shared toy"} <= set(METHODS)
    assert "toy" in quick_methods()
    assert "shared toy" not in quick_methods()
    assert {"toy", "shared toy"} <= set(all_methods())
    assert all_methods()[-1] == "random"
    examples = tuple(replace(one, relevant=((True,) + (False,) * 4,)) for one in batch_of(5, 5).examples)
    task = Task(name="toy", examples=examples, relevant="the first token", classes=("a", "b", "c"))
    settings = ExplanationSettings(
        methods=("rollout", "toy", "shared toy"), rollout=Rollout(residual=0.25, layers=range(3)), resamples=50
    )
    explanation = explain(ToyAttention(), task, settings)
    assert set(explanation.tokens["toy"]) == {0.25}
    assert set(explanation.tokens["shared toy"]) == {0.75}
    assert {"toy", "shared toy"} <= set(explanation.methods["method"])
    assert explanation.description["settings"]["rollout"]["layers"] == [0, 1, 2]


def test_names_are_unique_and_an_unknown_one_lists_the_known_ones():
    assert not set(MEASURES) & set(ATTRIBUTION_METHODS)
    with pytest.raises(CallError, match="there is already an attention measure named 'rollout'"):
        MEASURES.add(MEASURES["rollout"])
    with pytest.raises(
        CallError, match="there is no attention measure 'magic'; expected one of rollout, attention flow"
    ):
        MEASURES["magic"]
    with pytest.raises(
        CallError, match=r"there is no method 'magic'; expected one of integrated gradients, .*value norms"
    ):
        METHODS["magic"]
    assert len(METHODS) == len(list(METHODS)) == len(MEASURES) + len(ATTRIBUTION_METHODS)


def test_every_entry_says_where_it_comes_from():
    for name, method in METHODS.items():
        assert method.name == name
        assert method.source


def test_a_run_that_is_over_takes_no_more_collectors():
    run = SharedRun(ToyAttention(), batch_of(4), Rollout())
    assert run.fused_maps() is run.fused_maps()
    run.run()
    with pytest.raises(CallError, match="the model has run already"):
        run.fused_norms()
