"""A CircuitProbe in the Trainer of transformers."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from ...analyses.trajectories.store import RunStore
from ...circuits.errors import CallError
from ..training.circuit_probe import CircuitProbe
from ..training.gathering import is_shared
from .options import demand_options


class CircuitProbeCallback(TrainerCallback):
    """Creates a `CircuitProbe` when training begins, so that it starts from the weights and the step of a resumed run.

        trainer.add_callback(CircuitProbeCallback("run/", every=100))
        trainer.train()  # and later trainer.train(resume_from_checkpoint=True), which goes on in the same store

    Steps are the Trainer's, one for all batches whose gradients it accumulates. Gradients are those that the optimizer
    finds, after clipping and without the scale of mixed precision. When several processes train, only the first has a
    probe, unless they share the parameters (`fully_shard`) and gather them together.

    Each row has the learning rate of its step, and as `training_loss` the loss that the Trainer logged last: the mean
    since the log before, at the step `training_loss_step`. What the Trainer logs at a step that is logged here too is
    stored with it; the Trainer reports these values after the step has been passed to `log`.

    Attributes:
        probe: The `CircuitProbe`, once training has begun.
    """

    def __init__(self, store: Path | str | None = None, every: Any = 100, **options: Any) -> None:
        """Keep the arguments for the probe.

        Args:
            store: The folder of the run store, as for `CircuitProbe`.
            every: The steps to log, as for `CircuitProbe`.
            **options: Other arguments of `CircuitProbe`, except `start` and `optimizer`, which the Trainer knows.

        Raises:
            CallError: `start` or `optimizer` is given, or an argument that a probe does not have.
        """
        demand_options(options, {"start": "the Trainer", "optimizer": "the Trainer"})
        self._options = {"store": store, "every": every, **options}
        self._probe: CircuitProbe | None = None
        self._has_hooks = False
        self._loss: dict[str, float] = {}

    @property
    def probe(self) -> CircuitProbe:
        """The probe.

        Raises:
            CallError: Training has not begun.
        """
        if self._probe is None:
            raise CallError("training has not begun in this process, so there is no probe yet")
        return self._probe

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Create the probe.

        Raises:
            CallError: Training begins anew, and the store holds a run already.
        """
        if not state.is_world_process_zero and not is_shared(kwargs["model"]):
            return
        if self._probe is not None:
            self._probe.close()
        start, store = state.global_step, self._options["store"]
        options: dict[str, Any] = {"resume": start > 0} | self._options
        if store is not None and not options["resume"] and RunStore(store).exists():
            raise CallError(
                f"{store} already holds a run, and training begins anew: give the callback another folder, or continue "
                f"that run with trainer.train(resume_from_checkpoint=True)"
            )
        self._loss = _last_loss(state)
        self._probe = CircuitProbe(kwargs["model"], start=start, **options)
        optimizer = kwargs.get("optimizer")
        # An optimizer that steps by itself, as that of DeepSpeed, calls no hooks of torch.
        self._has_hooks = optimizer is not None and self._probe.is_trained_by(optimizer)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Copy the weights, and the gradients unless the optimizer's hooks will; they have been clipped by now."""
        if self._probe is not None:
            self._probe.begin_step(with_gradients=not self._has_hooks)
            self._probe.note(**self._loss, **_rate_of(kwargs.get("optimizer")))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the step."""
        if self._probe is not None:
            self._probe.end_step()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Store what the Trainer logs with the step."""
        logs = kwargs.get("logs") or {}
        # The summary of the whole training, which the Trainer logs at the last step, does not belong to that step.
        if self._probe is None or "train_runtime" in logs:
            return
        scalars = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        if "loss" in scalars:
            scalars["loss_step"] = float(state.global_step)
            self._loss = {name: scalars[name] for name in ("loss", "loss_step")}
        # Releases of transformers differ in whether they log the rate of this step or of the next.
        if _rate_of(kwargs.get("optimizer")):
            scalars.pop("learning_rate", None)
        if scalars:
            self._probe.add_scalars(state.global_step, **scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Follow no optimizer any more; the probe's table stays."""
        if self._probe is not None:
            self._probe.close()


def _rate_of(optimizer: Any) -> dict[str, float]:
    """Return the learning rate of an optimizer's first group, if it has one."""
    groups = getattr(optimizer, "param_groups", None)
    return {"learning_rate": float(groups[0]["lr"])} if groups and "lr" in groups[0] else {}


def _last_loss(state: TrainerState) -> dict[str, float]:
    """Return the loss that a resumed run logged last, and its step."""
    logged = [entry for entry in state.log_history if "loss" in entry]
    return {"loss": float(logged[-1]["loss"]), "loss_step": float(logged[-1]["step"])} if logged else {}
