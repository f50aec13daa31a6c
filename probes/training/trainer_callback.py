"""CircuitProbe in the Trainer of transformers."""

from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords
from .circuit_probe import CircuitProbe


class CircuitProbeCallback(TrainerCallback):
    """Creates a `CircuitProbe` when training begins, so that it starts from the weights and the step of a resumed run.

        trainer.add_callback(CircuitProbeCallback("run/", every=100))

    Steps are the Trainer's, one for all batches whose gradients it accumulates. What the Trainer logs at a step that is
    logged here too is stored with it (`training_loss` is the mean since the Trainer last logged); the Trainer reports
    these values after the step has been passed to `log`. When several processes train, only the first has a probe.

    Attributes:
        probe: The `CircuitProbe`, once training has begun.
    """

    def __init__(self, store: Path | str | None = None, every: Any = 100, **options: Any) -> None:
        """Keep the arguments for the probe.

        Args:
            store: The folder of the run store, as for `CircuitProbe`.
            every: The steps to log, as for `CircuitProbe`.
            **options: Other arguments of `CircuitProbe`, except `start`, which the Trainer knows.

        Raises:
            CallError: `start` is given, or an argument that a probe does not have.
        """
        if "start" in options:
            raise CallError("the Trainer sets the step at which the probe starts: leave out start")
        known = _options_of_probe()
        unknown = [name for name in options if name not in known]
        if unknown:
            raise CallError(f"a CircuitProbe has no option {unknown[0]}; it has {', '.join(known)}")
        self._options = {"store": store, "every": every, **options}
        self._probe: CircuitProbe | None = None

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
        """Create the probe."""
        if state.is_world_process_zero:
            self._probe = CircuitProbe(kwargs["model"], start=state.global_step, **self._options)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Copy the weights and the gradients, which have been clipped by now."""
        if self._probe is not None:
            self._probe.begin_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the step."""
        if self._probe is not None:
            self._probe.end_step()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Store what the Trainer logs with the step."""
        logs = kwargs.get("logs") or {}
        # The summary of the whole training, which the Trainer logs at the last step, does not belong to that step.
        if "train_runtime" in logs:
            return
        scalars = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        if self._probe is not None and scalars:
            self._probe.add_scalars(state.global_step, **scalars)


def _options_of_probe() -> list[str]:
    parameters = signature(CircuitProbe).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]
    return [
        name for name in (*names, *ModelKeywords.__annotations__) if name not in ("model", "store", "every", "start")
    ]
