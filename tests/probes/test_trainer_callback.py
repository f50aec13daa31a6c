"""CircuitProbeCallback in the Trainer of transformers: its steps, its losses, and runs that it resumes."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from qkov.circuits import CallError, ReadingOptions
from qkov.circuits.algebra.factor_steps import STEP_QUANTITIES
from qkov.probes import CircuitProbeCallback

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
    told = callback.probe.table().groupby("step")["training_loss"].first()
    assert told[[0, 3]].isna().all()
    assert told[6] == logged[6]
    told = {str(name) for name in callback.probe.table() if str(name).startswith("training_")}
    assert {"training_loss", "training_learning_rate"} <= told
    assert not [name for name in told if name.startswith("training_train_")]


def test_a_resumed_run_goes_on_where_the_trainer_does(tmp_path):
    straight = CircuitProbeCallback(tmp_path / "straight", every=1)
    trainer(tmp_path / "one", straight).train()
    first = CircuitProbeCallback(tmp_path / "run", every=1)
    trainer(tmp_path / "two", first, max_steps=5).train()
    again = CircuitProbeCallback(tmp_path / "run", every=1, resume=True)
    with pytest.warns(
        UserWarning, match="resumes from step 3: its later steps, 2 of them, up to step 5, were moved to"
    ):
        trainer(tmp_path / "two", again).train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    found, wanted = (callback.probe.table() for callback in (again, straight))
    same = ["step", "layer", "head", "circuit", "frobenius_norm", "change_norm", *STEP_QUANTITIES[1:]]
    pd.testing.assert_frame_equal(found[same], wanted[same], rtol=1e-6)


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
    with pytest.raises(CallError, match="leave out start"):
        CircuitProbeCallback(start=3)
    with pytest.raises(
        CallError, match="a CircuitProbe has no option evry; it has optimizer, basis, rotary_offset, directions"
    ):
        CircuitProbeCallback(evry=3)
    for option in ({"heads": 4}, {"options": ReadingOptions(heads=4)}, {"log": print}):
        CircuitProbeCallback(**option)
