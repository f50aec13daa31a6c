"""CircuitProbeCallback in the Trainer of transformers: its steps, its losses, and runs that it resumes."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from qkov.analyses.trajectories import RunStore
from qkov.circuits import CallError, ReadingOptions
from qkov.circuits.algebra.factor_steps import STEP_QUANTITIES
from qkov.probes import CircuitProbe, CircuitProbeCallback

from .circuit_models import language_model

EXAMPLES = torch.randint(20, (48, 8), generator=torch.Generator().manual_seed(0))
RATE = 0.05


def trainer(folder, callback, **settings) -> Any:
    """Plain gradient descent over the examples in their order, without decay, clipping or reports elsewhere."""
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "logging_steps": 2,
        "save_steps": 3,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
        "data_seed": 0,
        "seed": 0,
    } | settings
    found = transformers.Trainer(
        model=language_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        args=transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in EXAMPLES],
        callbacks=[callback],
    )
    found.remove_callback(transformers.PrinterCallback)
    return found


def test_its_steps_are_the_trainer_s_whatever_it_accumulates(tmp_path):
    tables = []
    for batch, accumulated in ((8, 1), (2, 4)):
        callback = CircuitProbeCallback(every=2)
        settings: dict[str, Any] = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        trainer(tmp_path, callback, **settings).train()
        tables.append(callback.probe.table())
        assert callback.probe.steps == 6
    for table in tables:
        assert list(table["step"].unique()) == [0, 2, 4, 6]
        np.testing.assert_allclose(table[table["step"] > 0]["taken_rate"], RATE, rtol=0.05)
        assert (table[table["step"] > 0]["taken_exact_cosine"] > 0.999).all()
    np.testing.assert_allclose(
        tables[0][list(STEP_QUANTITIES[1:])], tables[1][list(STEP_QUANTITIES[1:])], rtol=1e-6, atol=1e-9
    )


def test_what_the_trainer_logs_of_a_logged_step_is_carried_along(tmp_path):
    callback = CircuitProbeCallback(tmp_path / "run", every=3)
    training = trainer(tmp_path, callback)
    training.train()
    logged = {entry["step"]: entry["loss"] for entry in training.state.log_history if "loss" in entry}
    assert set(logged) == {2, 4, 6}
    rows = callback.probe.table().groupby("step")[["training_loss", "training_loss_step"]].first()
    # The start has none, and step 3 has the last loss that was logged before it.
    assert rows.iloc[0].isna().tolist() == [True, True]
    assert rows.iloc[1:].to_numpy().tolist() == [[logged[2], 2], [logged[6], 6]]
    told = {str(name) for name in callback.probe.table() if str(name).startswith("training_")}
    assert {"training_loss", "training_learning_rate"} <= told
    assert not [name for name in told if name.startswith("training_train_")]


def test_every_row_has_the_rate_of_its_step_and_the_last_loss(tmp_path):
    callback = CircuitProbeCallback(every=1)
    training = trainer(tmp_path, callback, lr_scheduler_type="linear", max_steps=5)
    training.train()
    rows = callback.probe.table().groupby("step")[["training_learning_rate", "training_loss_step"]].first()
    # The rate falls from its first value to 0 after the last step.
    expected = [RATE * (1 - step / 5) for step in range(5)]
    np.testing.assert_allclose(rows["training_learning_rate"][1:], expected, rtol=1e-12)
    assert rows["training_loss_step"][1:].tolist()[1:] == [2, 2, 4, 4]
    assert np.isnan(rows["training_loss_step"][1])
    taken = callback.probe.table().query("step > 0").groupby("step")["taken_rate"].median()
    np.testing.assert_allclose(taken, expected, rtol=0.05)


def test_training_is_the_same_to_the_bit_with_and_without_it(tmp_path):
    weights = []
    for callback in (CircuitProbeCallback(every=1), transformers.TrainerCallback()):
        training = trainer(tmp_path, callback, optim="adamw_torch", max_grad_norm=0.5)
        training.train()
        weights.append([parameter.detach().clone() for parameter in training.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_clipping_is_part_of_the_gradients(tmp_path):
    norms = []
    for most in (0.0, 0.01):
        callback = CircuitProbeCallback(every=1)
        training = trainer(tmp_path, callback, max_grad_norm=most, max_steps=1, logging_steps=1)
        training.train()
        norms.append(callback.probe.table().query("step == 1")["exact_step_norm"].to_numpy())
    (total,) = (entry["grad_norm"] for entry in training.state.log_history if "grad_norm" in entry)
    np.testing.assert_allclose(norms[1] / norms[0], 0.01 / total, rtol=1e-4)


class Scaled(torch.optim.Optimizer):
    """Finds gradients that a scaler has multiplied, and undoes that itself, as fused optimizers do."""

    def __init__(self, parameters: Any, scale: float) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.grad_scale = torch.tensor(scale, dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self.grad_scale)
                parameter.sub_(group["lr"] * parameter.grad)
        return closure


def test_the_scale_of_mixed_precision_is_no_part_of_the_gradients(tmp_path):
    rows = []
    for scale in (1.0, 1024.0):
        callback = CircuitProbeCallback(every=1)
        training = trainer(tmp_path, callback, max_steps=2)
        training.optimizer = Scaled(training.model.parameters(), scale)

        def multiply(parameter: torch.Tensor, scale: float = scale) -> None:
            parameter.grad.mul_(scale)

        for parameter in training.model.parameters():
            parameter.register_post_accumulate_grad_hook(multiply)
        training.train()
        rows.append(callback.probe.table()[list(STEP_QUANTITIES[1:])])
    pd.testing.assert_frame_equal(*rows, rtol=1e-12)
    assert rows[1]["taken_rate"].notna().any()


class StepsByItself(torch.optim.SGD):
    """Wraps what is not an optimizer of torch, as that of DeepSpeed does."""

    optimizer = object()


def test_an_optimizer_that_steps_by_itself_calls_no_hooks(tmp_path):
    model = language_model("gpt2")
    probe = CircuitProbe(model)
    attention, others = (
        [parameter for name, parameter in model.named_parameters() if ("attn" in name) == of_attention]
        for of_attention in (True, False)
    )
    assert probe.is_trained_by(torch.optim.SGD(attention))
    assert not probe.is_trained_by(torch.optim.SGD(others))
    assert not probe.is_trained_by(StepsByItself(attention))
    assert not probe.is_trained_by(object())
    del probe
    callback = CircuitProbeCallback(every=1)
    training = trainer(tmp_path, callback, max_steps=2)
    training.optimizer = StepsByItself(training.model.parameters(), lr=RATE)
    training.train()
    rows = callback.probe.table().query("step > 0")
    assert (rows["taken_exact_cosine"] > 0.999).all()


def test_a_resumed_run_goes_on_where_the_trainer_does(tmp_path):
    straight = CircuitProbeCallback(tmp_path / "straight", every=1)
    trainer(tmp_path / "one", straight).train()
    first = CircuitProbeCallback(tmp_path / "run", every=1)
    trainer(tmp_path / "two", first, max_steps=5).train()
    again = CircuitProbeCallback(tmp_path / "run", every=1)
    with pytest.warns(
        UserWarning, match="resumes from step 3: its later steps, 2 of them, up to step 5, were moved to"
    ):
        trainer(tmp_path / "two", again).train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    found, wanted = (callback.probe.table() for callback in (again, straight))
    same = ["step", "layer", "head", "circuit", "frobenius_norm", "change_norm", *STEP_QUANTITIES[1:]]
    pd.testing.assert_frame_equal(found[same], wanted[same], rtol=1e-6)
    # The loss that the run had logged last before it was resumed.
    losses = found.groupby("step")["training_loss_step"].first()
    assert losses[1:].tolist()[1:] == [2, 2, 4, 4, 6]


def test_a_second_training_in_the_same_store_is_refused_with_what_to_do(tmp_path):
    callback = CircuitProbeCallback(tmp_path / "run", every=1)
    trainer(tmp_path, callback, max_steps=1).train()
    for again in (callback, CircuitProbeCallback(tmp_path / "run")):
        with pytest.raises(
            CallError,
            match=r"run already holds a run, and training begins anew: give the callback another folder, or continue "
            r"that run with trainer.train\(resume_from_checkpoint=True\)",
        ):
            trainer(tmp_path, again, max_steps=2).train()
    assert set(RunStore(tmp_path / "run").table()["step"]) == {0, 1}


def test_one_callback_follows_a_second_training(tmp_path):
    callback = CircuitProbeCallback(tmp_path / "run", every=1)
    training = trainer(tmp_path, callback, max_steps=3)
    training.train()
    first = callback.probe
    training.args.max_steps = 5
    training.train(resume_from_checkpoint=True)
    assert callback.probe is not first
    assert first.failures == callback.probe.failures == 0
    assert set(RunStore(tmp_path / "run").table()["step"]) == set(range(6))


def test_there_is_no_probe_before_training_and_none_beside_the_first_process():
    callback = CircuitProbeCallback()
    with pytest.raises(CallError, match="training has not begun in this process"):
        callback.probe  # noqa: B018
    state = transformers.TrainerState(is_world_process_zero=False)
    for event in ("on_train_begin", "on_pre_optimizer_step", "on_optimizer_step"):
        getattr(callback, event)(None, state, None, model=None)
    callback.on_log(None, state, None, logs={"loss": 1.0})
    with pytest.raises(CallError, match="training has not begun"):
        callback.probe  # noqa: B018
    for name in ("start", "optimizer"):
        with pytest.raises(CallError, match=f"the Trainer states the {name} of the probe: leave out {name}"):
            CircuitProbeCallback(**{name: 3})
    with pytest.raises(
        CallError, match="a CircuitProbe has no option evry; it has basis, rotary_offset, directions, log, log_filter"
    ):
        CircuitProbeCallback(evry=3)
    for option in ({"heads": 4}, {"options": ReadingOptions(heads=4)}, {"log": print}):
        CircuitProbeCallback(**option)
