"""CircuitProbe in the Trainer of transformers."""

from inspect import signature
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from ...circuits.errors import CallError
from .circuit_probe import CircuitProbe


class CircuitProbeCallback(TrainerCallback):
    """Makes a `CircuitProbe` as training begins, so that it starts from the weights and the step of a resumed run.

        trainer.add_callback(CircuitProbeCallback("run/", every=100))

    Steps are the Trainer's, one for all the batches whose gradients it accumulates. The figures that it logs for a step
    that is logged here too are carried along (`training_loss`, its mean since the Trainer last logged); it tells them
    after the step was handed to `log`. Of several processes the first alone has a probe.
    """

    def __init__(self, store: Path | str | None = None, every: Any = 100, **options: Any) -> None:
        """Keep what the probe will be made of.

        Args:
            store: folder of the run store, as of `CircuitProbe`.
            every: which steps to log, as of `CircuitProbe`.
            **options: others of `CircuitProbe`. `start` is the Trainer's.

        Raises:
            CallError: a start is given, or what is no option of a probe.
        """
        if "start" in options:
            raise CallError("the Trainer says at which step it starts: leave start out")
        known = [
            name for name in signature(CircuitProbe).parameters if name not in ("model", "store", "every", "start")
        ]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise CallError(f"a CircuitProbe has no option {unknown[0]}; it has {', '.join(known)}")
        self._options = {"store": store, "every": every, **options}
        self._probe: CircuitProbe | None = None

    @property
    def probe(self) -> CircuitProbe:
        """The probe, once training has begun.

        Raises:
            CallError: it has not.
        """
        if self._probe is None:
            raise CallError("training has not begun in this process, so there is no probe yet")
        return self._probe

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Make the probe."""
        if state.is_world_process_zero:
            self._probe = CircuitProbe(kwargs["model"], start=state.global_step, **self._options)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the weights and the gradients, clipped as they are by now."""
        if self._probe is not None:
            self._probe.begin_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the step."""
        if self._probe is not None:
            self._probe.end_step()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Carry along what the Trainer logs."""
        logs = kwargs.get("logs") or {}
        # The summary of the whole training, which is told at its last step, is not that step's.
        if "train_runtime" in logs:
            return
        figures = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        if self._probe is not None and figures:
            self._probe.add_scalars(state.global_step, **figures)
