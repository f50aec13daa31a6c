"""A CircuitProbe in the Trainer of Lightning."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ...analyses.trajectories.store import RunStore
from ...circuits.errors import CallError, QkovError
from ..training.circuit_probe import CircuitProbe
from ..training.gathering import is_shared
from .lightning import callback_class
from .options import demand_options

_Callback = callback_class()
_Base: Any = _Callback or object


class CircuitProbeLightningCallback(_Base):
    """Creates a `CircuitProbe` as training starts, from the weights and the step of a run that was resumed.

        trainer = lightning.Trainer(callbacks=[CircuitProbeLightningCallback("run/", every=100)])
        trainer.fit(module)  # and later trainer.fit(module, ckpt_path=...), which goes on in the same store

    Steps are those of the optimizers that train the attention, with automatic and manual optimization; batches whose
    gradients are accumulated do not count. Gradients are those that the optimizer finds, after clipping and without the
    scale of mixed precision. When several processes train, only the first has a probe.

    Each row has the learning rate of its step and, as `training_loss`, the loss that `training_step` returned in the
    batch of the step, if it did.

    Attributes:
        probe: The `CircuitProbe`, once training has started.
    """

    def __init__(self, store: Path | str | None = None, every: Any = 100, *, part: str = "", **options: Any) -> None:
        """Keep the arguments for the probe.

        Args:
            store: The folder of the run store, as for `CircuitProbe`.
            every: The steps to log, as for `CircuitProbe`.
            part: The path of the model within the LightningModule, such as "student", if it holds several.
            **options: Other arguments of `CircuitProbe`, except `start` and `optimizer`, which Lightning knows.

        Raises:
            CallError: `start` or `optimizer` is given, or an argument that a probe does not have.
            QkovError: Lightning is not installed.
        """
        if _Callback is None:
            raise QkovError("Lightning is not installed: pip install lightning")
        super().__init__()
        demand_options(options, {"start": "Lightning", "optimizer": "Lightning"})
        self._options, self._part = {"store": store, "every": every, **options}, part
        self._probe: CircuitProbe | None = None
        self._resumed: int | None = None
        self._seen = 0
        self._rate: dict[str, float] = {}

    @property
    def probe(self) -> CircuitProbe:
        """The probe.

        Raises:
            CallError: Training has not started.
        """
        if self._probe is None:
            raise CallError("training has not started in this process, so there is no probe yet")
        return self._probe

    @property
    def state_key(self) -> str:
        """The name under which checkpoints hold the number of steps; callbacks of other stores have others."""
        return f"{type(self).__qualname__}{{'store': {str(self._options['store'])!r}}}"

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, for a checkpoint; Lightning's own counts those of all optimizers."""
        return {} if self._probe is None else {"steps": self._probe.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the number of steps from a checkpoint."""
        self._resumed = state_dict.get("steps")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the probe.

        Raises:
            CallError: Training starts anew, and the store holds a run already; the module has no such part; or no
                optimizer trains the attention.
        """
        if not trainer.is_global_zero and not is_shared(pl_module):
            return
        if self._probe is not None:
            self._probe.close()
        start, self._resumed = (trainer.global_step if self._resumed is None else self._resumed), None
        store = self._options["store"]
        options: dict[str, Any] = {"resume": start > 0} | self._options
        if store is not None and not options["resume"] and RunStore(store).exists():
            raise CallError(
                f"{store} already holds a run, and training starts anew: give the callback another folder, or continue "
                f"that run with trainer.fit(module, ckpt_path=...)"
            )
        try:
            model = pl_module.get_submodule(self._part)
        except AttributeError:
            name = type(pl_module).__name__
            raise CallError(f"{name} has no part {self._part!r} in which to find attention: give its path") from None
        self._probe = CircuitProbe(model, start=start, **options)
        self._probe.attach([optimizer for optimizer in trainer.optimizers if self._probe.is_trained_by(optimizer)])
        self._seen = self._probe.steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
        """Note the learning rate of the step that is about to be taken."""
        if self._probe is not None and self._probe.is_trained_by(optimizer):
            self._rate = {"learning_rate": float(optimizer.param_groups[0]["lr"])}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Store the loss and the learning rate with the step that the batch ended, if it did."""
        if self._probe is not None and self._probe.steps > self._seen:
            self._seen = self._probe.steps
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            scalars = {"loss": loss} if isinstance(loss, Tensor) and loss.numel() == 1 else {}
            self._probe.step(**scalars, **self._rate)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Follow no optimizer any more; the probe's table stays."""
        if self._probe is not None:
            self._probe.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Follow no optimizer any more, as at the end."""
        if self._probe is not None:
            self._probe.close()
