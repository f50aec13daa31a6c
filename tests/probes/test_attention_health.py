"""The health of attention in training: what it sees is what the kernel computed, and it leaves training as it was."""

import copy
import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.circuits import CallError, open_model, score_bound
from qkov.probes import AttentionHealth
from qkov.probes.health.history import HealthHistory, Limits
from qkov.probes.health.report import report
from qkov.probes.health.scores import LayerScores
from torch import Tensor, nn

from ..analyses.tiny_models import small
from .fused_models import NanoGPT, batches, loss_of
from .kernels import Recorded, plain_attention

HEADS, LENGTH = 4, 10
ADAM = torch.optim.Adam


def language_model(kind: str = "sdpa", dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    sizes: Any = {"n_layer": 2, "n_head": HEADS, "n_embd": 24, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    model: Any = transformers.GPT2LMHeadModel._from_config(config, attn_implementation=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def train(model: Any, optimizer: Any, steps: int) -> None:
    for tokens in batches(steps):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()


def quiet(model: Any, optimizer: Any, **options: Any) -> AttentionHealth:
    return AttentionHealth(model, optimizer, **{"tell": None, "on_error": "raise", **options})


def by_hand(recorded: Recorded, layers: int) -> dict[int, tuple[list[float], list[float]]]:
    """The largest score and the mean entropy of each head, from what torch's kernel got, in numpy."""
    visible = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
    found: dict[int, tuple[list[float], list[float]]] = {}
    for layer in range(layers):
        parts = []
        for got, _ in recorded.calls[layer::layers]:
            query = got["query"]
            weights, scores = plain_attention(query, got["key"], query.shape[-1] ** -0.5, visible)
            largest = np.where(visible, scores, -np.inf).max(axis=(0, 2, 3))
            logs = np.log(np.where(weights > 0, weights, 1.0))
            parts.append((largest, -(weights * logs).sum(axis=-1).mean(axis=(0, 2))))
        found[layer] = (
            np.max([part[0] for part in parts], axis=0).tolist(),
            np.mean([part[1] for part in parts], axis=0).tolist(),
        )
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_scores_and_entropies_are_those_of_what_the_kernel_got_over_all_passes_of_a_step(micro_batches):
    model = language_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with quiet(model, optimizer) as health:
        for _ in range(2):
            with Recorded() as recorded:
                for tokens in batches(micro_batches):
                    loss_of(model, tokens).backward()
            expected.append(by_hand(recorded, 2))
            optimizer.step()
            optimizer.zero_grad()
    table = health.table()
    assert list(table.columns) == [
        "step",
        "layer",
        "head",
        "max_logit",
        "entropy",
        "growth",
        "passes_at",
        "holding_rate",
    ]
    for step, layers in enumerate(expected, 1):
        for layer, (largest, entropy) in layers.items():
            rows = table[(table["step"] == step) & (table["layer"] == layer)]
            np.testing.assert_allclose(rows["max_logit"], largest, rtol=1e-12)
            np.testing.assert_allclose(rows["entropy"], entropy, rtol=1e-12)


def test_training_is_the_same_to_the_bit_and_nothing_stays_behind():
    states = []
    for with_health in (False, True):
        model = language_model(dropout=0.1).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        if with_health:
            with quiet(model, optimizer) as health:
                train(model, optimizer, 6)
            assert health.steps == 6
            after = len(health.table())
            train(copy.deepcopy(model), optimizer, 1)
            assert len(health.table()) == after == 6 * 2 * HEADS
            assert "__call__" not in vars(type(model.transformer.h[0].attn))
            health.close()
        else:
            train(model, optimizer, 6)
        states.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


def test_only_due_steps_are_watched():
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = []
    with quiet(model, optimizer, every=[2, 5], start=1) as health:
        for tokens in batches(5):
            watched.append("__call__" in vars(type(model.transformer.h[0].attn)))
            loss_of(model, tokens).backward()
            optimizer.step()
    assert watched == [True, False, False, True, False]
    assert health.table()["step"].unique().tolist() == [2, 5]
    assert health.steps == 6


def test_passes_without_gradients_do_not_count():
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tables = []
    for evaluates in (False, True):
        with quiet(model, optimizer) as health:
            for tokens in batches(2):
                if evaluates:
                    with torch.no_grad():
                        model(tokens.flip(1))
                loss_of(model, tokens).backward()
                optimizer.step()
        tables.append(health.table())
    assert tables[0].equals(tables[1])


def test_steps_are_those_of_several_optimizers_together():
    model = language_model()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:4], lr=0.1), ADAM(parameters[4:], lr=0.01)]
    with quiet(model, optimizers) as health:
        for tokens in batches(3):
            loss_of(model, tokens).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert health.table()["step"].unique().tolist() == [1, 2, 3]


class TwoKernels(nn.Module):
    """Attention that calls its kernel twice in a forward, which is not known how to read."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)
        self.calls = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            heads = self.projection(x).unflatten(-1, (2, 4)).transpose(1, 2)
            x = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return x


def test_what_cannot_be_read_is_told_once_and_training_goes_on():
    model = TwoKernels()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(calls: int) -> None:
        model.calls = calls
        model(torch.ones(1, 3, 8)).sum().backward()
        optimizer.step()

    with AttentionHealth(model, optimizer, tell=None) as health:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for calls in (1, 2, 2, 1):
                step(calls)
        assert len([one for one in caught if "called a kernel of attention 2 times" in str(one.message)]) == 1
        assert health.failures == 4
        assert health.steps == 4
        assert health.table()["step"].unique().tolist() == [1, 4]
    with quiet(model, optimizer), pytest.raises(CallError, match="called a kernel of attention 2 times"):
        step(2)


def test_a_step_without_a_pass_of_the_model_is_told():
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = copy.deepcopy(model)
    with (
        AttentionHealth(model, optimizer, tell=None) as health,
        pytest.warns(UserWarning, match="no pass of GPT2LMHeadModel that computes gradients was seen"),
    ):
        train(other, optimizer, 2)
    assert health.failures == 2


def test_eager_attention_tells_entropies_alone():
    model = language_model("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="forms maps, which do not tell the scores"):
        health = quiet(model, optimizer)
    fused = language_model()
    with health, quiet(fused, torch.optim.SGD(fused.parameters(), lr=0.1)) as other:
        for each, stepped in ((model, optimizer), (fused, None)):
            loss_of(each, next(batches(1))).backward()
            if stepped is not None:
                stepped.step()
        other._step_ended()
    assert health.table()["max_logit"].isna().all()
    assert health.table()["passes_at"].isna().all()
    np.testing.assert_allclose(health.table()["entropy"], other.table()["entropy"], rtol=1e-5)
    assert "The scores are unknown." in health.report()
    assert "The scores are unknown." not in other.report()


def test_any_module_that_calls_torch_s_kernel_can_be_watched():
    model = NanoGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(model, optimizer) as health:
        train(model, optimizer, 2)
    assert health.table()["max_logit"].notna().all()


def test_bounds_are_those_of_the_weights_now_and_hold_what_is_seen():
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with quiet(model, optimizer) as health:
        train(model, optimizer, 2)
    expected = torch.cat([score_bound(weights) for weights in open_model(model).layers()])
    table = health.bounds()
    np.testing.assert_allclose(table["bound"], expected, rtol=1e-12)
    assert bool((table["bound"].to_numpy() >= health.table()["max_logit"].to_numpy()[: 2 * HEADS]).all())
    assert table["unknown"].eq("").all()


def test_a_layer_without_a_bound_says_why():
    model: Any = transformers.BertModel(small("BertConfig"))
    with quiet(model, torch.optim.SGD(model.parameters(), lr=0.1)) as health:
        bounds = health.bounds()
    assert bounds["bound"].isna().all() == bounds["unknown"].ne("").all()


LIMITS = Limits(limit=100.0, least=0.0, horizon=100, window=20, kept=30)


def history_of(scores: list[list[float]], **options: Any) -> HealthHistory:
    history = HealthHistory(LIMITS, **{"tell": None, **options})
    for step, values in enumerate(scores, 1):
        largest = torch.tensor(values, dtype=torch.float64)
        history.add(step, {("", 0): LayerScores(largest, torch.full_like(largest, 0.5))})
    return history


def growing(rate: float, steps: int, first: float = 1.0) -> list[float]:
    return [first * math.exp(rate * step) for step in range(steps)]


def test_an_alarm_is_given_once_when_danger_begins_and_again_after_it_ended():
    # The growth passes 100 within 100 steps from ln(100) - 100 rho on.
    scores = growing(0.03, 70) + [8.0] * 40 + growing(0.03, 40, 8.0)
    told: list[str] = []
    history = history_of([[score, 1.0] for score in scores], tell=told.append)
    first = next(step for step, score in enumerate(scores, 1) if math.log(100 / score) / 0.03 <= 100)
    assert [alarm.head for alarm in history.alarms] == [0, 0]
    assert history.alarms[0].step == first
    assert history.alarms[1].step > 110
    assert told == [str(alarm) for alarm in history.alarms]
    assert math.isclose(history.alarms[0].growth, 0.03, rel_tol=1e-9)


def test_a_score_that_is_small_gives_no_alarm_however_fast_it_grows():
    scores = [[score] for score in growing(0.1, 60)]
    assert history_of(scores).alarms[0].step == 5
    history = HealthHistory(dataclasses.replace(LIMITS, least=50.0), None)
    for step, values in enumerate(scores, 1):
        largest = torch.tensor(values, dtype=torch.float64)
        history.add(step, {("", 0): LayerScores(largest, largest)})
    (alarm,) = history.alarms
    assert alarm.score >= 50 > alarm.score * math.exp(-0.1)


def test_the_table_keeps_the_last_records():
    table = history_of([[score] for score in growing(0.01, 50)]).table()
    assert table["step"].tolist() == list(range(21, 51))
    np.testing.assert_allclose(table["growth"], 0.01, rtol=1e-9)
    passed = 1 + np.ceil(np.log(100) / 0.01 - 1e-6)
    np.testing.assert_allclose(table["passes_at"], passed, atol=1)


def test_a_report_tells_danger_and_its_absence():
    calm = report("Model", history_of([[5.0, 2.0]] * 8)).splitlines()
    assert calm == [
        "Model at step 8, 2 heads:",
        "The largest score is 5.0, of layer 0 head 0.",
        "The smallest entropy is 0.50 nats, of layer 0 head 0.",
        "No score of 0 or more passes 100 within 100 steps at its present growth.",
        "No alarms were given so far.",
    ]
    danger = report("Model", history_of([[score, 120.0, 2.0] for score in growing(0.05, 30)])).splitlines()
    assert danger[1] == "The largest score is 120.0, of layer 0 head 1."
    assert danger[3].startswith("The largest score of layer 0 head 1 is 120.0, which is not under the limit of 100; it")
    assert danger[4].startswith("The largest score of layer 0 head 0 is 4.3 and grows by 5.1 % a step, so that it")
    assert danger[5:] == ["2 alarms were given so far."]


def test_a_report_counts_what_is_unknown_and_what_it_does_not_list():
    text = report("Model", history_of([[120.0] * 12 + [-1.0]])).splitlines()
    assert sum("is not under the limit" in line for line in text) == 10
    assert text[-3:] == [
        "2 more have passed 100, or pass it so soon.",
        "The growth of 13 heads is unknown.",
        "12 alarms were given so far.",
    ]
    assert report("Model", history_of([])) == "Model: nothing was recorded yet."
    assert "The growth of 1 head is unknown.\n1 alarm was given so far." in report("Model", history_of([[120.0]]))


WRONG: dict[str, Any] = {
    "limit should be a finite number above 0, got 0": {"limit": 0.0},
    "limit should be a finite number above 0, got nan": {"limit": math.nan},
    "least should be a number from 0 to the limit of 100, got 101.0": {"least": 101.0},
    "window should be a whole number of at least 5, got 4": {"window": 4},
    "horizon should be a whole number of at least 1, got 0": {"horizon": 0},
    "kept should be a whole number of at least 1, got 0": {"kept": 0},
    "start should be a number of steps, got -1": {"start": -1},
    "every should be a whole number of at least 1": {"every": 0},
    "on_error should be 'warn' or 'raise', got 'ignore'": {"on_error": "ignore"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused(message):
    model = language_model()
    with pytest.raises(CallError, match=message):
        quiet(model, torch.optim.SGD(model.parameters(), lr=0.1), **WRONG[message])


def test_another_model_s_optimizer_and_models_without_attention_are_refused():
    model = language_model()
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(CallError, match="SGD holds no parameter of GPT2LMHeadModel: give the optimizer that trains it"):
        quiet(model, foreign)
    with pytest.raises(CallError, match=r"expected a torch\.optim\.Optimizer"):
        quiet(model, None)
    with pytest.raises(CallError, match="no attention was found in Linear"):
        quiet(nn.Linear(2, 2), foreign)


def test_what_is_watched_is_named():
    model = language_model()
    with quiet(model, torch.optim.SGD(model.parameters(), lr=0.1)) as health:
        assert repr(health) == "AttentionHealth(GPT2LMHeadModel, step 0, 0 alarms, 0 failures)"
        assert health.report() == "GPT2LMHeadModel: nothing was recorded yet."
        assert health.table().empty
