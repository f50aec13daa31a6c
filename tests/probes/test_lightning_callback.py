"""CircuitProbeLightningCallback in the Trainer of Lightning: its steps, its losses, and runs that it resumes."""

import copy
import logging
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import RunStore
from qkov.circuits import CallError
from qkov.circuits.algebra.factor_steps import STEP_QUANTITIES
from qkov.probes import CircuitProbeLightningCallback
from torch.utils.data import DataLoader

from .circuit_models import Classifier, loss_of
from .test_circuit_probe import dense_gradients
from .test_training_loops import assert_figures

lightning = pytest.importorskip("lightning.pytorch")

BATCHES = 8
RATE = 0.1


class Batches(torch.utils.data.Dataset):
    """Whole batches, whose seeds are their numbers, or all the same."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> int:
        return number if self.seed is None else self.seed


class Module(lightning.LightningModule):
    """The classifier with automatic optimization, by gradient descent at a rate that falls."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.net = Classifier()
        self.make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=RATE))

    def training_step(self, seed: torch.Tensor) -> Any:
        return loss_of(self.net, int(seed))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByHand(Module):
    """The same by two optimizers, of which one trains the attention, and manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, seed: torch.Tensor) -> Any:
        attention, rest = self.optimizers()
        loss = loss_of(self.net, int(seed))
        for optimizer in (attention, rest):
            optimizer.zero_grad()
        self.manual_backward(loss)
        rest.step()
        attention.step()
        return {"loss": loss, "other": 1}

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.attention.parameters(), lr=RATE),
            torch.optim.SGD(self.net.readout.parameters(), lr=RATE),
        ]


def trainer(folder, *callbacks: Any, **settings: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings = {"max_steps": 4, "max_epochs": -1, "enable_checkpointing": False} | settings
    return lightning.Trainer(
        default_root_dir=str(folder),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )


def fit(training: Any, module: Any, seed: int | None = None, **options: Any) -> None:
    with warnings.catch_warnings():
        # Lightning's own advice on data loaders, and on what it calls in torch.
        warnings.filterwarnings("ignore", module="lightning|torch")
        warnings.filterwarnings("ignore", message=".*(num_workers|isinstance.treespec|LeafSpec).*")
        training.fit(module, DataLoader(Batches(seed), batch_size=None), **options)


class Watching(lightning.Callback):
    """Keeps the factors before and after each batch, and the gradients of the dense products for its seed."""

    def __init__(self) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.gradients: list[Any] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        _, pl_module, batch, _ = arguments
        self.before.append(pl_module.net.factors())
        self.gradients.append(dense_gradients(copy.deepcopy(pl_module.net), int(batch)))
        with torch.no_grad():
            self.losses.append(float(loss_of(pl_module.net, int(batch))))

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.after.append(arguments[1].net.factors())


@pytest.mark.parametrize("kind", [Module, ByHand])
def test_figures_are_those_of_the_dense_products(tmp_path, kind):
    callback, seen = CircuitProbeLightningCallback(every=1), Watching()
    fit(trainer(tmp_path, callback, seen, max_steps=4 if kind is Module else 8), kind())
    assert callback.probe.steps == 4
    assert callback.probe.failures == 0
    expected = dict(enumerate(zip(seen.before, seen.after, seen.gradients, strict=True), 1))
    assert_figures(callback.probe, expected)
    rows = callback.probe.table().groupby("step")[["training_loss", "training_learning_rate"]].first()
    np.testing.assert_allclose(rows["training_loss"][1:], seen.losses, rtol=1e-12)
    rates = [RATE * 0.5**step for step in range(4)] if kind is Module else [RATE] * 4
    np.testing.assert_allclose(rows["training_learning_rate"][1:], rates, rtol=1e-12)
    assert rows.iloc[0].isna().tolist() == [True, True]


def test_a_part_of_a_module_is_measured_and_optimizers_are_let_go_after_an_error(tmp_path):
    class Failing(Module):
        def training_step(self, seed: torch.Tensor) -> Any:
            if int(seed) == 2:
                raise RuntimeError("of the user's own")
            return super().training_step(seed)

    module, callback = Failing(), CircuitProbeLightningCallback(every=1, part="net")
    with pytest.raises(RuntimeError, match="of the user's own"):
        fit(trainer(tmp_path, callback), module)
    assert callback.probe.steps == 2
    assert "Classifier" in repr(callback.probe)
    loss_of(module.net, 0).backward()
    torch.optim.SGD(module.parameters(), lr=RATE).step()
    assert callback.probe.steps == 2


def test_batches_whose_gradients_are_accumulated_are_no_steps(tmp_path):
    callback, seen = CircuitProbeLightningCallback(every=1), Watching()
    fit(trainer(tmp_path, callback, seen, accumulate_grad_batches=2, max_steps=2), Module())
    assert len(seen.before) == 4
    assert callback.probe.steps == 2
    expected = {}
    for step in (1, 2):
        one, two = (seen.gradients[2 * step - 2 + part] for part in (0, 1))
        gradients = {name: [(g + h) / 2 for g, h in zip(one[name], two[name], strict=True)] for name in one}
        expected[step] = (seen.before[2 * step - 2], seen.after[2 * step - 1], gradients)
    assert_figures(callback.probe, expected)


def test_clipping_is_part_of_the_gradients(tmp_path):
    norms, seen = [], Watching()
    for most in (None, 0.01):
        callback = CircuitProbeLightningCallback(every=1)
        fit(trainer(tmp_path, callback, seen, gradient_clip_val=most, max_steps=1), Module())
        norms.append(callback.probe.table().query("step == 1")["exact_step_norm"].to_numpy())
    model = Classifier()
    loss_of(model, 0).backward()
    total = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    np.testing.assert_allclose(norms[1] / norms[0], 0.01 / float(total), rtol=1e-4)


@pytest.mark.parametrize("kind", [Module, ByHand])
def test_training_is_the_same_to_the_bit_with_and_without_it(tmp_path, kind):
    weights = []
    for callbacks in ([CircuitProbeLightningCallback(every=1)], []):
        module = kind()
        fit(trainer(tmp_path, *callbacks), module)
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.parametrize("kind", [Module, ByHand])
def test_a_resumed_run_goes_on_where_it_was(tmp_path, kind):
    # Every batch is the same one, since a data loader does not know where it was.
    each = 1 if kind is Module else 2  # Lightning counts the steps of every optimizer
    straight = CircuitProbeLightningCallback(tmp_path / "straight", every=1)
    fit(trainer(tmp_path, straight, max_steps=5 * each), kind(), seed=3)
    first = CircuitProbeLightningCallback(tmp_path / "run", every=1)
    training = trainer(tmp_path, first, max_steps=3 * each)
    module = kind()
    fit(training, module, seed=3)
    training.save_checkpoint(tmp_path / "last.ckpt")
    again = CircuitProbeLightningCallback(tmp_path / "run", every=1)
    fit(trainer(tmp_path, again, max_steps=5 * each), kind(), seed=3, ckpt_path=str(tmp_path / "last.ckpt"))
    assert again.probe.steps == 5
    found, wanted = (callback.probe.table() for callback in (again, straight))
    same = ["step", "layer", "head", "circuit", "frobenius_norm", "change_norm", *STEP_QUANTITIES[1:]]
    pd.testing.assert_frame_equal(found[same], wanted[same], rtol=1e-6)


def test_a_second_training_in_the_same_store_is_refused_with_what_to_do(tmp_path):
    callback = CircuitProbeLightningCallback(tmp_path / "run", every=1)
    fit(trainer(tmp_path, callback, max_steps=1), Module())
    with pytest.raises(CallError, match=r"run already holds a run, and training starts anew: .*ckpt_path=\.\.\."):
        fit(trainer(tmp_path, CircuitProbeLightningCallback(tmp_path / "run"), max_steps=1), Module())
    assert set(RunStore(tmp_path / "run").table()["step"]) == {0, 1}


def test_wrong_calls_are_refused(tmp_path):
    with pytest.raises(CallError, match="training has not started in this process"):
        CircuitProbeLightningCallback().probe  # noqa: B018
    for name in ("start", "optimizer"):
        with pytest.raises(CallError, match=f"Lightning states the {name} of the probe: leave out {name}"):
            CircuitProbeLightningCallback(**{name: 3})
    with pytest.raises(CallError, match="a CircuitProbe has no option evry; it has basis"):
        CircuitProbeLightningCallback(evry=3)
    with pytest.raises(CallError, match="Module has no part 'student' in which to find attention: give its path"):
        fit(trainer(tmp_path, CircuitProbeLightningCallback(part="student")), Module())
    one, other = CircuitProbeLightningCallback("a"), CircuitProbeLightningCallback("b")
    assert one.state_key != other.state_key
    assert one.state_dict() == {}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callback_is_that_of_the_lightning_in_use(package):
    code = (
        f"import {package} as used\n"
        "from qkov.probes import CircuitProbeLightningCallback\n"
        "assert issubclass(CircuitProbeLightningCallback, used.Callback)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_lightning_the_probes_are_there_and_its_callback_says_what_to_install():
    code = (
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "from qkov.probes import *\n"
        "from qkov.probes import CircuitProbeLightningCallback\n"
        "try:\n"
        "    CircuitProbeLightningCallback()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found == "QkovError Lightning is not installed: pip install lightning\n"
