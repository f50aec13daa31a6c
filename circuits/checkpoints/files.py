"""The files that make up a checkpoint: its weights, the model's config and the trainer's state."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..storage.places import Place
from .folders import Folder, weights_of
from .parallel.distributed_file import METADATA
from .steps.names import step_in
from .tensor_file import SUFFIXES

TRAINER_STATE = "trainer_state.json"
_CONFIGS = ("config.json", "params.json", "model_config.yaml", "lit_config.json")
#: Weights in a library's own format go with the config of that format, whatever else is beside them.
_CONFIGS_OF = {
    "lit_model.pth": ("model_config.yaml", "lit_config.json"),
    "consolidated.00.pth": ("params.json",),
    "consolidated.safetensors": ("params.json",),
}
#: nanochat saves a file about each of its models, which has the same number.
_NANOCHAT = re.compile(r"model_(\d+)\.pt")


@dataclass(frozen=True)
class CheckpointFiles:
    """The places of a checkpoint's files, so that nobody has to look for them a second time.

    Attributes:
        weights: The file or index of the weights.
        config: The file with the model's dimensions, if there is one.
        trainer_state: The trainer's state, if there is one.
        parts: All files of the weights if they are spread over several, each with the numbers of its layer and head,
            joined by a dot; `weights` is the first of them.
        element: The prefix of the checkpoint's tensors if the file holds several checkpoints.
    """

    weights: Place
    config: Place | None = None
    trainer_state: Place | None = None
    parts: tuple[tuple[str, Place], ...] = ()
    element: str = ""

    @property
    def sidecars(self) -> list[Place]:
        """The files beside the weights."""
        return [place for place in (self.config, self.trainer_state) if place is not None]

    def converted(self, convert: Callable[[Place], Place]) -> "CheckpointFiles":
        """Return the same files with each place replaced by what `convert` returns for it."""
        config, state = (place and convert(place) for place in (self.config, self.trainer_state))
        parts = tuple((part, convert(place)) for part, place in self.parts)
        return CheckpointFiles(parts[0][1] if parts else convert(self.weights), config, state, parts, self.element)


def files_at(place: Place) -> CheckpointFiles:
    """Find the files of the checkpoint at a place: a file of weights, an index, or a model's folder.

    Raises:
        CallError: There is nothing at the place.
        QkovError: The folder holds no weights that can be read, or the place cannot be reached.
    """
    if place.is_folder():
        folder = Folder(place)
        return files_beside(weights_of(folder), folder)
    if not place.is_file():
        raise place.not_found(f"a file that ends in {', '.join(SUFFIXES)}, or a folder")
    return files_beside(place, None if place.parent is None else Folder(place.parent))


def files_beside(weights: Place, folder: Folder | None, of_run: Folder | None = None) -> CheckpointFiles:
    """Find the config and the trainer's state that belong to some weights.

    The config of a run may also be in the folder above, if the folder of the weights is that of a step, or holds the
    pieces of a distributed checkpoint.

    Args:
        weights: The file or index of the weights.
        folder: The folder that holds the weights.
        of_run: The folder above, if it is known to be that of the run.

    Returns:
        The weights together with the files found.

    Raises:
        QkovError: The folder cannot be reached.
    """
    if folder is None:
        return CheckpointFiles(weights)
    names = _CONFIGS_OF.get(weights.name, _CONFIGS)
    saved = _NANOCHAT.fullmatch(weights.name)
    if saved is not None:
        names = (f"meta_{saved[1]}.json", *names)
    config = _first_file(folder, names)
    is_below = step_in(folder.place.name) is not None or weights.name == METADATA
    above = folder.parent if of_run is None and is_below else of_run
    if config is None and above is not None:
        config = _first_file(above, names)
    return CheckpointFiles(weights, config, folder.file(TRAINER_STATE))


def _first_file(folder: Folder, names: tuple[str, ...]) -> Place | None:
    return next((place for name in names if (place := folder.file(name)) is not None), None)
