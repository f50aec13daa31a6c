"""Circuit rates in the Trainer of transformers and in Lightning's, against gradient descent by hand."""

import importlib
import os
import pickle
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import CallError, QkovError
from qkov.probes import CircuitRates, CircuitRatesCallback, CircuitRatesLightningCallback
from qkov.probes.callbacks import lightning_rates
from torch import nn
from torch.utils.data import DataLoader

from .circuit_models import language_model
from .fused_models import largest_difference

LR, QK, STEPS, EXAMPLES = 0.05, 5.0, 6, torch.randint(20, (48, 8), generator=torch.Generator().manual_seed(0))
IN_ORDER = [[{"input_ids": tokens, "labels": tokens}] for tokens in EXAMPLES.split(4)[:STEPS]]
#: Columns of c_attn that are queries and keys, of a model whose width is 12.
OF_QK = 24


def gpt2() -> Any:
    return language_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()


def by_hand(steps: list[list[dict[str, Any]]], rates: list[float], qk: float = QK) -> Any:
    """Gradient descent over the batches of each step, the columns of queries and keys at qk times the rate."""
    model = gpt2()
    for batches, rate in zip(steps, rates, strict=True):
        model.zero_grad()
        for inputs in batches:
            model(**inputs).loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                times = torch.ones_like(parameter)
                if name.endswith("c_attn.weight"):
                    times[:, :OF_QK] = qk
                parameter -= rate * times * parameter.grad
    return model


def seen_by(model) -> list[dict[str, Any]]:
    """What the model is called with from now on; among it what the Trainer divides the loss by."""
    seen = []
    model.register_forward_pre_hook(lambda _module, _args, inputs: seen.append(dict(inputs)), with_kwargs=True)
    return seen


def trainer(folder, callbacks, **settings) -> Any:
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    } | settings
    found = transformers.Trainer(
        model=gpt2(),
        args=transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in EXAMPLES],
        callbacks=callbacks,
    )
    found.remove_callback(transformers.PrinterCallback)
    return found


class Noted(transformers.TrainerCallback):
    """Notes whether a weight's steps are scaled, and the rate of each step."""

    def __init__(self, callback: CircuitRatesCallback) -> None:
        self.callback, self.are_scaled, self.rates = callback, [], []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):  # noqa: ARG002
        inside = kwargs["optimizer"].optimizer
        weight = kwargs["model"].transformer.h[0].attn.c_attn.weight
        self.are_scaled.append(self.callback.rates.scales(inside, weight))
        self.rates.append(inside.param_groups[0]["lr"])


@pytest.mark.parametrize("schedule", ["constant", "cosine_with_min_lr"])
def test_the_trainer_trains_at_the_rates_under_its_schedule(tmp_path, schedule):
    callback = CircuitRatesCallback(QK)
    noted = Noted(callback)
    min_lr = {"min_lr": LR / 2} if schedule != "constant" else {}
    training = trainer(tmp_path, [callback, noted], lr_scheduler_type=schedule, lr_scheduler_kwargs=min_lr)
    seen = seen_by(training.model)
    training.train()
    assert noted.are_scaled == [True] * STEPS
    steps = [[inputs] for inputs in seen]
    assert largest_difference(training.model, by_hand(steps, noted.rates)) < 1e-12
    assert largest_difference(training.model, by_hand(steps, noted.rates, 1.0)) > 1e-3
    # They are gone after the end.
    with pytest.raises(CallError, match="the circuit rates hold while training goes on in this process, which is not"):
        callback.rates  # noqa: B018
    assert not training.optimizer.optimizer._optimizer_step_pre_hooks


def test_accumulated_batches_are_one_step_of_the_trainer(tmp_path):
    training = trainer(
        tmp_path, [CircuitRatesCallback(QK)], per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    seen = seen_by(training.model)
    training.train()
    steps = [seen[at : at + 4] for at in range(0, 4 * STEPS, 4)]
    assert largest_difference(training.model, by_hand(steps, [LR] * STEPS)) < 1e-12


def test_the_trainer_keeps_scores_under_a_limit(tmp_path):
    callback = CircuitRatesCallback(1.0, guard=1e-3, guard_by="clip")
    with pytest.raises(
        CallError, match=r"there is no guard: give the callback guard=100\.0, and ask for it once training"
    ):
        callback.guard  # noqa: B018
    training = trainer(tmp_path, [callback])
    training.model.set_attn_implementation("sdpa")
    training.train()
    table = callback.guard.table()
    assert table["step"].unique().tolist() == list(range(1, STEPS + 1))
    assert table["clip"].lt(1).any()
    assert not training.optimizer.optimizer._optimizer_step_pre_hooks


def test_a_trainer_may_train_again(tmp_path):
    training = trainer(tmp_path, [CircuitRatesCallback({0: QK})])
    training.train()
    training.train()
    assert not training.optimizer.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("make", [CircuitRatesCallback, CircuitRatesLightningCallback])
def test_wrong_arguments_are_refused_before_training(make):
    with pytest.raises(CallError, match="the multiplier qk should be a finite number above 0, got -1"):
        make(-1.0)
    with pytest.raises(CallError, match="guard should be a finite number above 0, got 0"):
        make(guard=0.0)
    with pytest.raises(CallError, match="unexpected keyword 'head'"):
        make(head=4)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request) -> Any:
    """A package of Lightning; that of the test extra has to be there where everything has to be tested."""
    if request.param == "lightning.pytorch" and os.environ.get("CI"):
        return importlib.import_module(request.param)
    return pytest.importorskip(request.param)


def module_of(lightning, model: nn.Module, optimizer: Any, schedule: Any = None) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.rates = model, []

        def training_step(self, batch, _index):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return self.network(batch, labels=batch).loss

        def configure_optimizers(self):
            made = optimizer(self.parameters())
            return made if schedule is None else ([made], [{"scheduler": schedule(made), "interval": "step"}])

    return Module()


def fit(lightning, module, callback, folder, **settings) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    training = lightning.Trainer(
        callbacks=[callback], max_steps=STEPS, accelerator="cpu", default_root_dir=folder, **quiet, **settings
    )
    loader = DataLoader([tokens for tokens in EXAMPLES], batch_size=4)  # noqa: C416
    training.fit(module, loader)
    return training


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR)


def one_cycle(optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS + 1, cycle_momentum=False)


#: What Lightning says of itself and of this machine.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*in eval mode"),
]


@pytest.mark.parametrize("schedule", [None, one_cycle])
def test_lightning_trains_at_the_rates_under_its_schedule(lightning, schedule, tmp_path):
    callback = CircuitRatesLightningCallback(QK)
    module = module_of(lightning, gpt2(), sgd, schedule)
    training = fit(lightning, module, callback, tmp_path)
    assert largest_difference(module.network, by_hand(IN_ORDER, module.rates)) < 1e-12
    assert largest_difference(module.network, by_hand(IN_ORDER, module.rates, 1.0)) > 1e-3
    with pytest.raises(CallError, match="the circuit rates hold while training goes on"):
        callback.rates  # noqa: B018
    assert not training.optimizers[0]._optimizer_step_pre_hooks


def test_rates_are_gone_after_an_error_in_lightning(lightning, tmp_path):
    module = module_of(lightning, gpt2(), sgd)
    seen = []

    def fail(*_: Any) -> None:
        seen.append(bool(module.trainer.optimizers[0]._optimizer_step_pre_hooks))
        raise ZeroDivisionError

    module.training_step = fail
    callback = CircuitRatesLightningCallback(QK)
    with pytest.raises(ZeroDivisionError):
        fit(lightning, module, callback, tmp_path)
    assert seen == [True]
    assert not module.trainer.optimizers[0]._optimizer_step_pre_hooks


def test_a_part_of_a_lightning_module_has_the_rates(lightning, tmp_path):
    module = module_of(lightning, gpt2(), sgd)
    module.teacher = gpt2().requires_grad_(False)
    fit(lightning, module, CircuitRatesLightningCallback(QK, part="network"), tmp_path)
    assert largest_difference(module.network, by_hand(IN_ORDER, module.rates)) < 1e-12
    with pytest.raises(CallError, match="Module has no part 'pupil' in which to find attention: give its path"):
        fit(lightning, module, CircuitRatesLightningCallback(QK, part="pupil"), tmp_path)


def test_the_callback_of_lightning_can_be_sent_to_another_process(lightning):
    callback = pickle.loads(pickle.dumps(CircuitRatesLightningCallback({0: 3.0}, part="network")))
    assert callback._part == "network"
    with pytest.raises(CallError, match="the circuit rates hold while training goes on"):
        callback.rates  # noqa: B018


def test_without_lightning_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(lightning_rates, "_Callback", None)
    with pytest.raises(QkovError, match=r"^Lightning is not installed: pip install lightning$"):
        CircuitRatesLightningCallback(QK)


def test_accelerate_s_optimizer_is_refused_with_the_way_out():
    import accelerate

    model = gpt2()
    prepared: Any = accelerate.Accelerator(cpu=True).prepare(sgd(model.parameters()))
    with pytest.raises(
        CallError, match=r"AcceleratedOptimizer wraps another optimizer: give that one, its \.optimizer"
    ):
        CircuitRates(prepared, model)
    assert CircuitRates(prepared.optimizer, model).scales(prepared.optimizer, model.transformer.h[0].attn.c_attn.weight)
