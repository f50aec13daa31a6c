"""CircuitProbe in loops that are easily got wrong: figures are those of the step or missing, and training goes on."""

import copy
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from qkov.analyses.trajectories import RunStore
from qkov.circuits import CallError
from qkov.circuits.algebra.factor_steps import STEP_QUANTITIES
from qkov.probes import CircuitMuon, CircuitProbe, log_spaced
from qkov.probes.training.model import MOVERS
from qkov.probes.training.optimizer_steps import OptimizerSteps
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .circuit_models import Classifier, language_loss, language_model, loss_of
from .test_circuit_probe import dense_gradients, expected_figures

ROOT = Path(__file__).resolve().parents[2]


def assert_figures(probe: CircuitProbe, expected: dict[int, tuple[Any, Any, Any]], tolerance: float = 1e-8) -> None:
    """Compare the rows of steps with dense products: the factors before and after, and autograd on the products."""
    assert_rows(probe.table(), expected, tolerance)


def assert_rows(rows: pd.DataFrame, expected: dict[int, tuple[Any, Any, Any]], tolerance: float = 1e-8) -> None:
    assert sorted(rows["step"].unique()) == [0, *expected]
    for row in rows[rows["step"] > 0].to_dict("records"):
        before, after, gradients = expected[row["step"]]
        for name, value in expected_figures(before, after, gradients, row["circuit"], row["head"]).items():
            assert row[name] == pytest.approx(value, rel=tolerance, abs=1e-10), (name, row["step"], row["circuit"])


class InPlace(torch.optim.SGD):
    """Changes the gradients as it steps, as optimizers without a schedule do."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1000)
        return result


class BeforeIt(torch.optim.AdamW):
    """Changes the gradients before its base class steps."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(1000)
        super().step()
        return loss


@pytest.mark.parametrize("kind", [InPlace, BeforeIt])
@pytest.mark.parametrize("way", ["given", "step", "attach", "closure"])
def test_gradients_are_those_that_an_optimizer_finds_whatever_it_makes_of_them(kind, way):
    # Another optimizer of the same base class was made earlier in the process, so that its step has hooks as well.
    torch.optim.SGD(Classifier().parameters(), 0.1)
    model = Classifier()
    optimizer = kind(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=1, optimizer=None if way in ("step", "attach") else optimizer)
    if way == "attach":
        probe.attach(optimizer)
    expected = {}
    for step in (1, 2, 3):
        before, gradients = model.factors(), dense_gradients(model, step)

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        if way == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if way in ("step", "given"):
            probe.step(float(step))
        expected[step] = before, model.factors(), gradients
    assert probe.steps == 3
    assert_figures(probe, expected)


def test_an_optimizer_that_failed_within_its_step_is_followed_again():
    model = Classifier()
    optimizer = InPlace(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=1, optimizer=optimizer)

    def failing() -> float:
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        optimizer.step(failing)
    assert probe.steps == 0
    before, gradients = model.factors(), dense_gradients(model, 1)
    loss_of(model, 1).backward()
    optimizer.step()
    assert_figures(probe, {1: (before, model.factors(), gradients)})


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_probe_that_steps_before_the_optimizer_says_so_and_keeps_each_step_s_own_gradients(kind):
    model = Classifier()
    optimizer = kind(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=1)
    expected = {}

    def loop() -> None:
        for step in range(1, 5):
            before, gradients = model.factors(), dense_gradients(model, step)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            probe.step()
            optimizer.step()
            expected[step] = before, model.factors(), gradients

    with pytest.warns(UserWarning, match=r"probe\.step\(\) comes before optimizer\.step\(\)") as caught:
        loop()
    assert len(caught) == 1
    # The last step is not logged, for no call follows it.
    del expected[4]
    assert_figures(probe, expected)


def test_gradients_that_are_0_leave_the_figures_missing_and_are_told_once():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 0).backward()
    optimizer.step()
    probe = CircuitProbe(model, every=1, optimizer=optimizer)

    def loop() -> None:
        for step in (1, 2):
            loss_of(model, step).backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()

    with pytest.warns(UserWarning, match="the gradients of all attention weights are 0 or missing at step 1") as caught:
        loop()
    assert len(caught) == 1
    rows = probe.table().query("step > 0")
    assert rows[[name for name in STEP_QUANTITIES if name != "taken_step_norm"]].isna().all(axis=None)
    # Momentum moves the weights all the same.
    assert (rows["taken_step_norm"] > 0).all()


def split(model: Classifier) -> tuple[list[Any], list[Any]]:
    attention = [parameter for name, parameter in model.named_parameters() if "in_proj" in name]
    return attention, [parameter for name, parameter in model.named_parameters() if "in_proj" not in name]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("way", ["given", "step"])
def test_several_optimizers_make_one_step(order, way):
    model = Classifier()
    attention, rest = split(model)
    optimizers = [torch.optim.SGD(rest, lr=0.01), torch.optim.SGD(attention, lr=0.1)]
    probe = CircuitProbe(model, every=1, optimizer=optimizers if way == "given" else None)
    expected = {}
    for step in (1, 2, 3):
        before, gradients = model.factors(), dense_gradients(model, step)
        loss_of(model, step).backward()
        for number in order:
            # Gradients are gone after each optimizer's own step.
            optimizers[number].step()
            optimizers[number].zero_grad()
        if way == "step":
            probe.step()
        expected[step] = before, model.factors(), gradients
    assert probe.steps == 3
    assert_figures(probe, expected)
    rate = probe.table().query("circuit == 'QK' and step > 0")["taken_rate"]
    np.testing.assert_allclose(rate, 0.1, rtol=0.05)


def test_attention_that_no_given_optimizer_moves_is_named_and_a_foreign_one_refused():
    model, other = Classifier(), Classifier()
    attention, rest = split(model)
    partial, whole = torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(attention, lr=0.1)
    with pytest.warns(UserWarning, match=r"no optimizer that the probe was given trains attention.in_proj_weight, att"):
        probe = CircuitProbe(model, every=1, optimizer=partial)
    with pytest.raises(CallError, match=r"^SGD holds no attention parameter of the model: give the optimizer that tra"):
        CircuitProbe(model, optimizer=[whole, torch.optim.SGD(other.parameters(), lr=0.1)])
    for wrong in (3, [], [whole, None], "adam"):
        with pytest.raises(CallError, match=r"expected a torch\.optim\.Optimizer|got an empty list"):
            CircuitProbe(model, optimizer=wrong)
    loss_of(model, 1).backward()
    with pytest.warns(
        UserWarning, match=r"^SGD, which was not given to the probe, moves attention\.in_proj_weight; its"
    ):
        whole.step()
    partial.step()
    assert probe.steps == 1


def test_an_optimizer_that_replaces_another_is_followed():
    model = Classifier()
    first, second = (torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.2))
    probe = CircuitProbe(model, every=1, optimizer=first)
    expected = {}
    for step in range(1, 6):
        optimizer = first if step < 3 else second
        before, gradients = model.factors(), dense_gradients(model, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert bool(caught) == (step == 3)
        expected[step] = before, model.factors(), gradients
    probe.close()
    assert probe.steps == 5
    assert_figures(probe, expected)


@pytest.mark.parametrize("way", ["given", "wrapped", "step"])
def test_micro_batches_of_accelerate_are_no_steps(way):
    model = Classifier()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, wrapped = accelerator.prepare(model, plain)
    given = {"given": plain, "wrapped": wrapped, "step": None}[way]
    probe = CircuitProbe(model, every=1, optimizer=given)
    expected = {}
    before, halves = model.factors(), []
    for number in range(8):
        if number % 2 == 0:
            before = model.factors()
            halves = [dense_gradients(model, number + part) for part in (0, 1)]
        with accelerator.accumulate(prepared):
            loss = loss_of(prepared, number)
            accelerator.backward(loss)
            wrapped.step()
            probe.step(loss)
            wrapped.zero_grad()
        if number % 2:
            mean = {
                name: [(one + other) / 2 for one, other in zip(*(half[name] for half in halves), strict=True)]
                for name in ("QK", "OV")
            }
            expected[number // 2 + 1] = before, model.factors(), mean
    assert probe.steps == 4
    assert_figures(probe, expected)


def test_micro_batches_by_hand_are_no_steps():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=3)
    for number in range(12):
        (loss_of(model, number) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
        probe.step()
        if number % 4 == 3:
            optimizer.zero_grad()
    assert probe.steps == 3
    assert sorted(probe.table()["step"].unique()) == [0, 3]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("unscales", [False, True])
def test_the_scale_of_a_scaler_is_no_part_of_the_gradients(kind, unscales):
    model = Classifier()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    probe = CircuitProbe(model, every=1, optimizer=optimizer)
    before, gradients = model.factors(), dense_gradients(model, 1)
    scaler.scale(loss_of(model, 1)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert_figures(probe, {1: (before, model.factors(), gradients)}, tolerance=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_a_scaler_skips_is_none(fused):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    probe = CircuitProbe(model, every=1, optimizer=optimizer)
    before, gradients = model.factors(), dense_gradients(model, 1)
    for factor in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * loss_of(model, 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert probe.steps == 1
    assert_figures(probe, {1: (before, model.factors(), gradients)}, tolerance=1e-6)


def test_what_is_noted_after_a_step_is_stored_with_it_and_passed_on():
    model, records = Classifier(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=1, optimizer=optimizer, log=records.__setitem__)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        probe.step(float(step))
        assert probe.steps == step
    losses = probe.table().groupby("step")["training_loss"].first()
    assert losses[[1, 2, 3]].tolist() == [1.0, 2.0, 3.0]
    # The first step was passed on before anyone could know that its loss comes after it.
    assert [records[step].get("training/loss") for step in (1, 2, 3)] == [None, 2.0, 3.0]


class Failing:
    """Raises at some steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def __call__(self, step: int, values: dict[str, float]) -> None:
        del values
        if step in self.steps:
            raise ConnectionError("the logger is away")


def trained(model: Classifier, probe: CircuitProbe, optimizer: Any, steps: int, after: Callable[[int], None]) -> None:
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        probe.step()
        after(step)


def test_a_failure_while_training_is_told_once_and_counted():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=1, log=Failing({1, 3}), optimizer=optimizer)
    with pytest.warns(UserWarning, match=r"^logging step 1 failed, .*ConnectionError: the logger is away") as caught:
        trained(model, probe, optimizer, 4, lambda _: None)
    assert len(caught) == 1
    assert probe.failures == 2
    assert probe.steps == 4
    probe = CircuitProbe(model, every=1, log=Failing({1}), optimizer=optimizer, on_error="raise")
    with pytest.raises(ConnectionError):
        trained(model, probe, optimizer, 1, lambda _: None)
    with pytest.raises(CallError, match="on_error should be 'warn' or 'raise', got 'ignore'"):
        CircuitProbe(model, on_error="ignore")


def test_a_layer_that_is_removed_or_added_does_not_stop_training():
    model = language_model("gpt2")
    x = torch.arange(2, 18).view(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=1, optimizer=optimizer)
    removed = model.transformer.h[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 7):
            if step == 3:
                model.transformer.h = torch.nn.ModuleList([model.transformer.h[0]])
            if step == 5:
                model.transformer.h.append(removed)
            optimizer.zero_grad()
            model(x, labels=x).loss.backward()
            optimizer.step()
    assert probe.steps == 6
    assert probe.failures == 0, [str(warning.message) for warning in caught]
    layers = probe.table().groupby("step")["layer"].unique().map(list)
    assert layers.to_dict() == {step: [0] if step in (3, 4) else [0, 1] for step in range(7)}


def test_training_is_the_same_to_the_bit_with_and_without_a_probe():
    models, probes = [], []
    for with_probe in (False, True):
        model = Classifier()
        optimizer = InPlace(model.parameters(), lr=0.05, momentum=0.9)
        if with_probe:
            probes.append(CircuitProbe(model, every=1, optimizer=optimizer))
            copy.deepcopy(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        models.append(model)
    assert probes[0].steps == 5
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "every", [np.int64(2), [2, 4], np.array([2, 4]), torch.tensor([2, 4]), lambda step: step % 2 == 0]
)
def test_every_takes_any_kind_of_numbers(every):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CircuitProbe(model, every=every, optimizer=optimizer) as probe:
        trained(model, probe, optimizer, 5, lambda _: None)
    assert sorted(probe.table()["step"].unique()) == [0, 2, 4]
    assert not optimizer._optimizer_step_post_hooks
    probe.close()
    CircuitProbe(model).close()
    loss_of(model, 6).backward()
    optimizer.step()
    assert probe.steps == 5


@pytest.mark.parametrize("every", [0, -1, 1.5, True, [], [1.5], "2"])
def test_what_is_no_schedule_is_refused(every):
    with pytest.raises(CallError, match="every should be a whole number of at least 1, some steps, or a function"):
        CircuitProbe(Classifier(), every=every)


def test_steps_with_evenly_spaced_logarithms():
    assert log_spaced(100, 2) == [1, 3, 10, 32, 100]
    assert log_spaced(12, 3) == [1, 2, 5, 10, 12]
    assert log_spaced(1) == [1]
    for wrong in (0, 1.5, True):
        with pytest.raises(CallError, match="last should be a whole number of at least 1"):
            log_spaced(wrong)


PROCESSES = """
import sys
import warnings
import torch
import torch.distributed
from qkov.circuits import CallError
from qkov.probes import CircuitProbe
from tests.probes.circuit_models import Classifier, loss_of

rank, store, rendezvous = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(Classifier())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    probe = CircuitProbe(model.module, store, every=1, optimizer=optimizer)
for step in range(3):
    optimizer.zero_grad()
    loss = loss_of(model, 10 * step + rank)
    loss.backward()
    optimizer.step()
    probe.step(loss + 100 * rank)
probe.close()
try:
    print(rank, "rows", len(probe.table()), probe.steps)
except CallError as error:
    print(rank, "refused", error, "|", *(str(warning.message) for warning in caught))
torch.distributed.destroy_process_group()
"""


def test_of_several_processes_the_first_alone_measures_and_the_others_say_so(tmp_path):
    commands = [
        [sys.executable, "-c", PROCESSES, str(rank), str(tmp_path / "run"), str(tmp_path / "at")] for rank in (0, 1)
    ]
    options: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0].split() == ["0", "rows", "16", "3"]
    assert "1 refused this process measures nothing" in outputs[1][0]
    assert "this is process 1 of 2: the first one, of rank 0, measures" in outputs[1][0]
    # The gradients of both processes are the mean of theirs, and the loss is that of the first.
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, losses = {}, []
    for step in range(3):
        before = model.factors()
        halves = [dense_gradients(model, 10 * step + rank) for rank in (0, 1)]
        optimizer.zero_grad()
        parts = [loss_of(model, 10 * step + rank) for rank in (0, 1)]
        ((parts[0] + parts[1]) / 2).backward()
        optimizer.step()
        losses.append(float(parts[0].detach()))
        mean = {
            name: [(one + other) / 2 for one, other in zip(*(half[name] for half in halves), strict=True)]
            for name in ("QK", "OV")
        }
        expected[step + 1] = before, model.factors(), mean
    table = RunStore(tmp_path / "run").table()
    assert_rows(table, expected)
    assert table.groupby("step")["training_loss"].first().dropna().tolist() == pytest.approx(losses, rel=1e-12)


def test_a_parameter_that_was_deleted_is_not_taken_for_another_one_at_its_place_in_memory():
    gone = [nn.Parameter(torch.ones(3)) for _ in range(1000)]
    places, begun = {id(parameter) for parameter in gone}, []
    steps = OptimizerSteps(
        [(str(number), parameter) for number, parameter in enumerate(gone)], lambda: bool(begun.append(1)), lambda: None
    )
    steps.watch()
    del gone
    others = [nn.Parameter(torch.ones(3)) for _ in range(1000)]
    assert places & {id(parameter) for parameter in others}
    for parameter in others:
        parameter.grad = torch.ones(3)
    torch.optim.SGD(others, 0.1).step()
    assert not begun
    assert not steps.seen


def test_attention_that_is_frozen_is_not_named_as_left_out():
    model = language_model("gpt2")
    frozen = model.transformer.h[0].attn.c_attn.weight.requires_grad_(requires_grad=False)
    trained = [parameter for parameter in model.parameters() if parameter is not frozen]
    with CircuitProbe(model, optimizer=torch.optim.SGD(trained, 0.1)):
        pass


def test_a_probe_that_is_collected_during_a_step_does_not_stop_training():
    """torch iterates over its hooks as it calls them, so nothing may remove one then."""
    model = Classifier()
    stepping = torch.optim.SGD(model.parameters(), 0.1)
    with CircuitProbe(model, every=1, optimizer=stepping, log=lambda *_: gc.collect()) as probe:
        for seed in range(3):
            other = CircuitProbe(model, every=1)
            cycle = [other]
            cycle.append(cycle)
            loss_of(model, seed).backward()
            del other, cycle
            stepping.step()
        assert probe.steps == 3
        assert probe.failures == 0


def test_the_last_probe_that_is_closed_leaves_no_hook():
    model = Classifier()
    one, two = CircuitProbe(model), CircuitProbe(model)
    gc.collect()
    for probe in (one, two):
        assert len(_global_optimizer_pre_hooks) > 0
        probe.close()
    two.close()
    assert len(_global_optimizer_pre_hooks) == 0
    assert len(_global_optimizer_post_hooks) == 0


def test_rows_say_which_optimizer_moved_each_factor_and_at_what_rate():
    model = language_model("llama")
    attention = model.model.layers[0].self_attn
    of_query = torch.optim.SGD([attention.q_proj.weight], 0.1)
    of_key = torch.optim.AdamW(
        [{"params": [attention.k_proj.weight], "lr": 0.02}, {"params": [attention.o_proj.weight]}], 0.01
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(of_key, 0.5)
    with pytest.warns(UserWarning, match=r"no optimizer that the probe was given trains .*v_proj"):
        probe = CircuitProbe(model, every=1, optimizer=[of_query, of_key])
    with probe:
        for step in range(2):
            language_loss(model, step).backward()
            of_query.step()
            of_key.step()
            schedule.step()
            model.zero_grad()
    told = probe.table().groupby(["step", "circuit"])[list(MOVERS)].first()
    for step, rate in ((1, 1.0), (2, 0.5)):
        rows = told.reset_index().query(f"step == {step}").set_index("circuit")[list(MOVERS)].T.to_dict("list")
        assert rows["QK"] == ["AdamW", 0.02 * rate, "SGD", 0.1]
        left, left_rate, right, right_rate = rows["OV"]
        assert (left, left_rate) == ("AdamW", 0.01 * rate)
        assert right is None or pd.isna(right)
        assert pd.isna(right_rate)
    assert told.loc[0].isna().all(axis=None)


def test_fused_factors_are_moved_by_one_optimizer_and_parts_of_one_factor_by_several():
    model = language_model("gpt2")
    first, second = model.transformer.h
    one = torch.optim.SGD([first.attn.c_attn.weight, first.attn.c_proj.weight], 0.1)
    two = torch.optim.Adam(second.attn.parameters(), 0.001)
    others = {id(each) for each in (*one.param_groups[0]["params"], *two.param_groups[0]["params"])}
    rest = torch.optim.AdamW([each for each in model.parameters() if id(each) not in others], 0.001)
    with CircuitProbe(model, every=1, optimizer=[one, two, rest]) as probe:
        language_loss(model, 0).backward()
        for optimizer in (one, two, rest):
            optimizer.step()
    rows = probe.table().query("step == 1")
    assert set(rows.query("layer == 0")["left_optimizer"]) == {"SGD"}
    assert set(rows.query("layer == 0")["right_learning_rate"]) == {0.1}
    assert set(rows.query("layer == 1")["right_optimizer"]) == {"Adam"}


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon", "CircuitMuon heads", "CircuitMuon products"])
def test_steps_of_every_optimizer_are_compared_with_the_exact_step_and_with_omega(name):
    """Against autograd on dense products: what the optimizer did is taken from the factors before and after."""
    model = Classifier()
    make: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
        "AdamW": lambda: [torch.optim.AdamW(model.parameters(), 0.01)],
        "SGD": lambda: [torch.optim.SGD(model.parameters(), 0.1)],
        "Muon": lambda: [
            torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], 0.01),
            torch.optim.SGD([each for each in model.parameters() if each.ndim != 2], 0.1),
        ],
        "CircuitMuon heads": lambda: [muon := CircuitMuon(model, 0.01), torch.optim.SGD(muon.others, 0.1)],
        "CircuitMuon products": lambda: [
            muon := CircuitMuon(model, 0.01, of="products"),
            torch.optim.SGD(muon.others, 0.1),
        ],
    }
    optimizers, expected = make[name](), {}
    with CircuitProbe(model, every=1, optimizer=optimizers) as probe:
        for step in range(1, 3):
            before = model.factors()
            gradients = dense_gradients(model, step)
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            expected[step] = before, model.factors(), gradients
    assert_figures(probe, expected, tolerance=1e-7)
    rows = probe.table().query("step > 0")
    assert set(rows["left_optimizer"]) == {name.split()[0]}


def test_a_gradient_at_the_place_in_memory_of_an_earlier_one_is_new():
    parameter = nn.Parameter(torch.ones(3))
    steps = OptimizerSteps([("weight", parameter)], lambda: False, lambda: None)
    steps.watch()
    stepping = torch.optim.SGD([parameter], 0.1)
    places = set()
    for _ in range(50):
        parameter.grad = torch.ones(3)
        places.add(id(parameter.grad))
        stepping.step()
        assert not steps.has_new_gradients()
        parameter.grad = None
        parameter.grad = torch.ones(3)
        assert steps.has_new_gradients()
        places.add(id(parameter.grad))
    assert len(places) < 100
    steps.close()
