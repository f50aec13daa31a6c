"""Rows of several measures from one run: those that each measure gives by itself."""

import pytest
import torch
from qkov.analyses.attention import MEASURES, Batch, Rollout, readout_rows
from qkov.analyses.attention.measures.attention_rows import attention_rows
from qkov.analyses.attention.measures.registry import streamed_measures
from qkov.analyses.tasks import Example
from qkov.circuits import CallError

from .tiny_models import CAUSAL, CLASSIFIERS, MASK, MASKED
from .toy_attention import ToyAttention, batch_of


@pytest.mark.parametrize("tiny", [CLASSIFIERS[0], CAUSAL[1], MASKED[0]], ids=lambda tiny: tiny.name)
def test_one_run_gives_what_each_measure_gives_by_itself(tiny):
    model = tiny.adapted()
    examples = [Example((11, 12, MASK, 14, 15)), Example((MASK, 21, 22))]
    batch = Batch.of(examples, model.pad)
    runs = []
    model._model.register_forward_pre_hook(lambda *_: runs.append(1))
    found = attention_rows(model, batch)
    assert len(runs) == 1
    assert tuple(found.measures) == streamed_measures()
    for name, rows in found.measures.items():
        torch.testing.assert_close(rows, MEASURES[name](model, batch), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.heads, readout_rows(model, batch))
    assert found.readout.tolist() == model.reading_positions(batch).tolist()


def test_the_settings_hold_for_every_measure():
    model, batch = ToyAttention(), batch_of(6, 4)
    settings = Rollout(residual=0.2, heads="max")
    found = attention_rows(model, batch, ("layer mean", "rollout"), settings)
    assert list(found.measures) == ["layer mean", "rollout"]
    largest = readout_rows(model, batch).amax(dim=2)
    expected = (largest / largest.sum(dim=-1, keepdim=True)).mean(dim=1)
    torch.testing.assert_close(found.measures["layer mean"], expected)
    assert not torch.allclose(found.measures["rollout"], attention_rows(model, batch, ("rollout",)).measures["rollout"])


def test_what_one_run_cannot_give_is_refused():
    with pytest.raises(CallError, match=r"gradient rollout runs the model itself; one shared run gives rollout, "):
        attention_rows(ToyAttention(), batch_of(3), ("gradient rollout",))
    with pytest.raises(
        CallError, match="there is no attention measure 'magic'; expected one of rollout, attention flow"
    ):
        attention_rows(ToyAttention(), batch_of(3), ("magic",))
    with pytest.raises(CallError, match="not every measure keeps heads separate"):
        attention_rows(ToyAttention(), batch_of(3), settings=Rollout(heads=(1.0, 0.0, 0.0, 0.0)))
