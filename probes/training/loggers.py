"""Where the values of logged steps go: TensorBoard, Weights & Biases, and loggers that are called as these are."""

from typing import Any

from ...circuits.errors import CallError
from .log_filter import Log

#: The name of the step among the values of a run of Weights & Biases.
_WANDB_STEP = "circuits/step"


def log_to_tensorboard(writer: Any) -> Log:
    """Return what a probe takes as `log` to write its values to TensorBoard.

        CircuitProbe(model, log=log_to_tensorboard(SummaryWriter("runs/one")))

    Args:
        writer: A SummaryWriter of torch or tensorboardX, or what has a method `add_scalar(name, value, step)`.

    Raises:
        CallError: It has no such method.
    """
    _demand(writer, "add_scalar", "a SummaryWriter")

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def log_to_wandb(run: Any) -> Log:
    """Return what a probe takes as `log` to write its values to a run of Weights & Biases.

        CircuitProbe(model, log=log_to_wandb(wandb.init(project="circuits")))

    The step is the value `circuits/step`, against which the circuits are plotted. The run's own count of rows stays
    yours: values are added to the row that is open, which your next `run.log` or `run.finish` completes.

    Args:
        run: What `wandb.init` returns.

    Raises:
        CallError: It is not a run.
    """
    for attribute in ("define_metric", "step"):
        _demand(run, attribute, "what wandb.init returns")
    for circuit in ("QK", "OV"):
        run.define_metric(f"{circuit}.*", step_metric=_WANDB_STEP)
    open_row: int | None = None

    def log(step: int, values: dict[str, float]) -> None:
        nonlocal open_row
        if run.step == open_row:
            # Nobody completed the row that holds the step before.
            run.log({}, commit=True)
        run.log({_WANDB_STEP: step, **values}, commit=False)
        open_row = run.step

    return log


def log_to(logger: Any) -> Log:
    """Return what a probe takes as `log` to write its values to a logger such as trackio.

        CircuitProbe(model, log=log_to(trackio))

    Args:
        logger: A module or an object with a function `log(values, step=...)`.

    Raises:
        CallError: It has no such function.
    """
    _demand(logger, "log", "a logger such as trackio")
    return lambda step, values: logger.log(values, step=step)


def _demand(given: Any, attribute: str, expected: str) -> None:
    if not hasattr(given, attribute):
        raise CallError(f"expected {expected}, which has the attribute {attribute}, got {given!r}")
