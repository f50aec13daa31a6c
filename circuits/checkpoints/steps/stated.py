"""Training steps that a file of weights, or the state of training beside it, states itself."""

import json
from typing import Any

from ..sidecars import STEP
from ..tensor_file import TensorFile
from .numbers import whole_number
from .step import Step, Unit

#: Names under which training scripts save the step, the most reliable first.
_STEPS = ("global_step", "iter_num", "iteration", "num_updates", "iter", "step", "current_step", "train_step")
#: The same for the epoch, which counts as the step where nothing better is saved.
_EPOCHS = ("epoch", "current_epoch", "epoch_num")
UNITS: tuple[tuple[tuple[str, ...], Unit], ...] = ((_STEPS, "step"), (_EPOCHS, "epoch"))
#: Dictionaries in which training scripts save where training stood; other ones hold settings, such as args.epoch.
_STATES = ("state", "train_state", "training_state", "trainer_state", "trainer", "progress", "meta", "metadata", "info")
#: The entry of a safetensors file's metadata that qkov itself writes.
_OWN = "qkov"


def stated_step(file: TensorFile) -> Step | None:
    """Return the step that the trainer's state or the file itself states, or None if neither does.

    The epoch counts only where no step is stated.
    """
    if STEP in file.training:
        return Step(int(file.training[STEP]), f"{STEP} in the trainer's state")
    own = _own(file.metadata)
    if own is not None:
        return own
    for names, unit in UNITS:
        for prefix in ("", *(f"{state}." for state in _STATES)):
            for name in names:
                step = _known(f"{prefix}{name}", file, unit)
                if step is not None:
                    return step
    return None


def _known(name: str, file: TensorFile, unit: Unit) -> Step | None:
    number = number_of_step(file.values.get(name))
    if number is not None:
        return Step(number, f"{name} in the file", unit)
    number = whole_number(file.metadata.get(name, ""))
    return None if number is None else Step(number, f"{name} in the file's metadata", unit)


def number_of_step(value: Any) -> int | None:
    """Return a value as the number of a step, or None if it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if 0 <= value < 2**63 and value == int(value) else None


def _own(metadata: dict[str, str]) -> Step | None:
    try:
        number = number_of_step(json.loads(metadata[_OWN])["step"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return None if number is None else Step(number, "step in the file's metadata")
