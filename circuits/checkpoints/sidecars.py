"""What stands beside the weights and says something of them: the model's numbers, the state of training."""

import json
from dataclasses import dataclass
from typing import Any

from ..errors import QkovError
from ..storage.places import Place
from .step_names import marked_step
from .tensor_file import Plain

TRAINER_STATE = "trainer_state.json"
_CONFIGS = ("config.json", "params.json", "model_config.yaml", "lit_config.json")
#: Weights in a library's own form go by the config of that form, whatever else lies beside them.
_CONFIGS_OF = {
    "lit_model.pth": ("model_config.yaml", "lit_config.json"),
    "consolidated.00.pth": ("params.json",),
    "consolidated.safetensors": ("params.json",),
}


@dataclass(frozen=True)
class Sidecars:
    """The files beside some weights: the one that says the model's numbers, and the trainer's state."""

    config: Place | None
    trainer_state: Place | None

    @property
    def places(self) -> list[Place]:
        """Those that are there."""
        return [place for place in (self.config, self.trainer_state) if place is not None]


def sidecars_of(folder: Place, weights: str) -> Sidecars:
    """Return what stands in the weights' folder, and the config above it where the folder is a step of a run.

    Args:
        folder: that holds the weights.
        weights: the name of their file.

    Raises:
        QkovError: the place cannot be reached.
    """
    names = _CONFIGS_OF.get(weights, _CONFIGS)
    config = _first(folder, names)
    above = folder.parent
    if config is None and above is not None and marked_step(folder.name) is not None:
        config = _first(above, names)
    return Sidecars(config, _first(folder, (TRAINER_STATE,)))


def read_config(place: Place) -> dict[str, Any]:
    """Return the table of a JSON or YAML file.

    Raises:
        QkovError: the file is damaged, or holds no table.
    """
    content = place.read_bytes()
    if place.suffix == ".yaml":
        import yaml  # most checkpoints have no YAML beside them

        try:
            table = yaml.safe_load(content)
        except yaml.YAMLError as error:
            raise QkovError(f"{place} is damaged: expected the YAML of a model's config; copy it again") from error
    else:
        try:
            table = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise QkovError(f"{place} is damaged: expected JSON ({error}); copy it again") from error
    if not isinstance(table, dict):
        raise QkovError(f"{place} is damaged: expected a table, found a {type(table).__name__}; copy it again")
    return table


def training_values(state: dict[str, Any], place: Place) -> dict[str, Plain]:
    """Return the loss and the learning rate that the trainer logged last, at or before the step of the weights.

    Raises:
        QkovError: the state is damaged.
    """
    values: dict[str, Plain] = {}
    try:
        step = global_step(state)
        for entry in state.get("log_history", []):
            if step is None or entry["step"] <= step:
                values |= {name: float(entry[name]) for name in ("loss", "learning_rate") if name in entry}
    except (KeyError, TypeError, ValueError) as error:
        raise QkovError(f"{place} is damaged: its log_history is no list of logged steps; copy it again") from error
    return values


def global_step(state: dict[str, Any]) -> int | None:
    """Return the step that a trainer's state is of, where it says so."""
    step = state.get("global_step")
    return step if isinstance(step, int) else None


def _first(folder: Place, names: tuple[str, ...]) -> Place | None:
    return next((place for name in names if (place := folder.child(name)).is_file()), None)
