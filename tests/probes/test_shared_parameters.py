"""CircuitProbe where two processes share a model's parameters (fully_shard): rows and training of one process alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import RunStore
from qkov.circuits import QkovError, open_model
from qkov.circuits.algebra.factor_steps import STEP_QUANTITIES
from qkov.probes import CircuitProbe
from qkov.probes.training.gathering import Gathering, is_shared, is_spread, local, stand_in
from qkov.probes.training.model import MOVERS

from ..circuits.adapted_models import NOT_OURS
from .shared_loop import KINDS, STEPS, optimizer_of

ROOT = Path(__file__).resolve().parents[2]
WAYS = [("gpt2", way) for way in ("given", "step", "hand", "callback")] + [
    (kind, "given") for kind in KINDS if kind != "gpt2"
]

pytestmark = pytest.mark.filterwarnings(*NOT_OURS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of two processes that have trained every kind of model."""
    folder = tmp_path_factory.mktemp("shared")
    commands = [[sys.executable, "-m", "tests.probes.shared_loop", str(rank), str(folder)] for rank in (0, 1)]
    options: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    outputs = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return folder


def results(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def alone() -> dict[str, pd.DataFrame]:
    """The rows of one process that trains on the batches of both."""
    tables = {}
    for kind, (make, loss_of, _) in KINDS.items():
        if kind == "compiled":
            # The same model as it is without compiling.
            tables[kind] = tables["gpt2"]
            continue
        model = make()
        optimizer = optimizer_of(model)
        probe = CircuitProbe(model, every=2, optimizer=optimizer, on_error="raise")
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = [loss_of(model, 10 * step + rank) for rank in (0, 1)]
            ((losses[0] + losses[1]) / 2).backward()
            optimizer.step()
            probe.step(losses[0])
        probe.close()
        tables[kind] = probe.table()
    return tables


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_rows_are_those_of_one_process_alone(folder, alone, kind, way):
    rows, expected = RunStore(folder / f"{kind} {way}").table(), alone[kind]
    assert sorted(rows["step"].unique()) == [0, 2, 4, 6]
    numbers = [name for name in expected if expected[name].dtype.kind == "f" and not name.startswith("training_")]
    assert {*STEP_QUANTITIES, "change_norm", "frobenius_norm"} <= set(numbers)
    assert ("adapter_rank" in numbers) == (kind == "lora")
    # Gradients that are handed over by hand are not those that an optimizer finds, so who moves them is not known.
    for name in [name for name in numbers if way != "hand" or name not in MOVERS]:
        np.testing.assert_allclose(rows[name], expected[name], rtol=1e-10, atol=1e-12, err_msg=name)
    for one, other in zip(rows["singular_values"], expected["singular_values"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    assert rows["source"].unique().tolist() == expected["source"].unique().tolist()
    if way in ("given", "step"):
        np.testing.assert_allclose(rows["training_loss"], expected["training_loss"], rtol=1e-12)


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_training_is_the_same_to_the_bit_with_and_without_a_probe(folder, kind, way):
    plain, watched = (torch.load(folder / f"{kind} {how}.pt") for how in ("none", way))
    assert plain.keys() == watched.keys()
    assert all(torch.equal(tensor, watched[name]) for name, tensor in plain.items())


def test_the_first_process_has_the_rows_and_the_others_say_what_they_do(folder):
    assert json.loads((folder / "gpt2 given 0.json").read_text()) == 4 * 12
    assert json.loads((folder / "gpt2 given 1.json").read_text()).startswith("this process measures nothing, since")
    assert results(folder, 0)["warnings"] == []
    (said,) = results(folder, 1)["warnings"]
    assert said == (
        "this is process 1 of 2: the first one, of rank 0, measures, and the probe of this one takes part in gathering "
        "the weights and writes nothing"
    )


def test_only_steps_that_are_due_take_communication(folder):
    for rank in (0, 1):
        counted = results(folder, rank)["counted"]
        beside = [watched - plain for watched, plain in zip(counted["3"], counted["None"], strict=True)]
        assert [number > 0 for number in beside] == [False, False, True] * 2


def test_a_measurement_that_fails_in_the_first_process_holds_up_nobody(folder):
    first, second = (results(folder, rank)["failing"]["away"] for rank in (0, 1))
    steps, failures, rows, (message,) = first
    assert (steps, failures, rows) == (3, 3, [0, 1, 2, 3])
    assert "ConnectionError: away" in message
    assert second == [3, 0, None, []]


def test_a_loss_may_be_noted_in_the_first_process_alone(folder):
    assert results(folder, 0)["failing"]["alone"] == [3, 0, [0, 1, 2, 3], []]


def test_probes_of_other_arguments_are_refused_in_all_processes(folder):
    for rank in (0, 1):
        told = results(folder, rank)["failing"]["settings"]
        assert told == (
            "QkovError: the arguments (every, start, basis, rotary_offset) differ between processes "
            "(1, None, raw, 0 in process 0; 2, None, raw, 0 in process 1): make the same probe in all of them"
        )
    of_first, of_second = (results(folder, rank)["failing"]["refused"] for rank in (0, 1))
    assert of_first.startswith("CallError: pyproject.toml/no folder cannot be written to")
    assert of_second == of_first.replace("CallError: ", "CallError: the probe of process 0 could not be made: ")


def test_processes_that_differ_in_the_steps_stop_gathering_and_go_on_training(folder):
    for rank in (0, 1):
        steps, failures, _, (message,) = results(folder, rank)["failing"]["function"]
        assert steps == 3
        assert failures >= 1
        assert "not all of the processes [0, 1] take part in gathering" in message
        assert "make the probe in every process, with the same arguments, and call it alike in all of them" in message
    assert results(folder, 0)["failing"]["function"][2] == [0]


def test_a_probe_that_a_process_lacks_is_refused_in_the_others(folder):
    assert results(folder, 0)["failing"]["lacking"].startswith(
        "QkovError: not all of the processes [0, 1] take part in gathering (Wait timeout): make the probe in every"
    )
    assert "lacking" not in results(folder, 1)["failing"]


def test_tensors_of_one_process_are_not_gathered():
    model = torch.nn.Linear(3, 2)
    assert Gathering.of(model) is Gathering.of(3) is None
    assert not is_shared(model)
    assert not is_spread(model.weight)
    assert local(model.weight) is model.weight
    zeros = stand_in(model.weight)
    assert zeros.shape == (2, 3)
    assert (zeros == 0).all()
    assert zeros.untyped_storage().nbytes() == zeros.element_size()


def test_a_model_that_processes_share_is_refused_elsewhere_with_the_way_out():
    class Spread(torch.nn.Parameter):
        """Stands for a tensor of torch that is spread over processes."""

        def full_tensor(self) -> torch.Tensor:
            raise AssertionError("one process alone would wait for ever")

    model = KINDS["gpt2"][0]()
    model.transformer.h[0].attn.c_attn.weight = Spread(model.transformer.h[0].attn.c_attn.weight.detach())
    with pytest.raises(
        QkovError, match=r"is distributed over processes .*: a CircuitProbe gathers it while the model is"
    ):
        next(open_model(model).layers())
