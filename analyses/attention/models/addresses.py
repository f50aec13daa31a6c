"""Where the files of a model are: in a folder, in a GGUF file, on the hub, or in the last checkpoint of a run."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ....circuits.checkpoints.runs import Run, find_run
from ....circuits.checkpoints.steps.names import step_in
from ....circuits.checkpoints.steps.step import step_in_words
from ....circuits.errors import CallError, QkovError
from ....circuits.public_addresses import public_address
from ....circuits.storage.address import place_of
from ....circuits.storage.lens import LensModel, is_lens, lens_checkpoints, lens_model
from ....circuits.storage.places import LocalPlace

_HUB = re.compile(r"(?:hf://)?(?P<name>[\w.\-]+(?:/[\w.\-]+)?)(?:@(?P<revision>[^\s/]+))?(?P<within>/.+)?")


@dataclass(frozen=True)
class ModelAddress:
    """The place of a model's files, as transformers takes it.

    Attributes:
        name: Folder on this machine, or name of a model on the hub.
        options: Options of `from_pretrained` beside it: the revision, the folder within the model, or the GGUF file.
        run: Folder of the run that the model is a checkpoint of; None if the address is that of the model itself.
        chosen: Which checkpoint of the run it is, in words; None likewise.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()
    run: str | None = None
    chosen: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the model is in a GGUF file."""
        return "gguf_file" in dict(self.options)

    @property
    def shown(self) -> str:
        """The address for people."""
        options = dict(self.options)
        revision = f"@{options['revision']}" if "revision" in options else ""
        within = options.get("gguf_file", options.get("subfolder"))
        return f"{self.name}{revision}{f'/{within}' if within else ''}"

    def loaded_by(self, load: Callable[..., Any], **options: Any) -> Any:
        """Return what a `from_pretrained` of transformers loads from the address.

        Args:
            load: The function.
            options: Further options.
        """
        return load(self.name, **dict(self.options), **options)


def model_address(address: Path | str) -> ModelAddress:
    """Find the files of a model.

    Args:
        address: A folder that transformers saved, a GGUF file, a name on the hub, `name@revision` or
            `hf://name/FOLDER`, `lens:NAME` or `lens:NAME@LABEL` for a model of the hub that TransformerLens names, or
            the folder of a run that transformers' Trainer wrote, whose last checkpoint is taken.

    Raises:
        CallError: The address is that of another machine, which transformers cannot load from; or TransformerLens does
            not know the name, or has the model in a format of its own.
        QkovError: The last checkpoint of the run cannot be read.
    """
    typed = str(address)
    if is_lens(typed):
        return _of_lens(lens_model(typed))
    if "://" in typed and not typed.startswith("hf://"):
        place = place_of(typed)
        if not isinstance(place, LocalPlace):
            raise CallError(
                f"{public_address(typed)} is on another machine, and explain runs the model; copy its folder to this "
                f"machine, or give its name on the hub"
            )
        typed = place.address
    path = Path(typed)
    if path.is_dir():
        return _in_folder(path)
    if path.suffix == ".gguf" and not typed.startswith("hf://"):
        return ModelAddress(str(path.parent), (("gguf_file", path.name),))
    match = None if path.exists() else _HUB.fullmatch(typed)
    if match is None:
        return ModelAddress(typed)
    within = (match["within"] or "").strip("/")
    if within and not typed.startswith("hf://"):
        return ModelAddress(typed)
    options = {
        "revision": unquote(match["revision"] or ""),
        "gguf_file" if within.endswith(".gguf") else "subfolder": within,
    }
    return ModelAddress(match["name"], tuple((key, value) for key, value in options.items() if value))


def _of_lens(model: LensModel) -> ModelAddress:
    if model.in_own_format:
        raise CallError(
            f"{model} ({model.official}) is in TransformerLens' own format, which transformers does not load"
        )
    if model.label is not None:
        lens_checkpoints(model)
    return ModelAddress(model.official, () if model.revision is None else (("revision", model.revision),))


def _in_folder(folder: Path) -> ModelAddress:
    has_checkpoints = any(step_in(entry.name) is not None for entry in folder.iterdir() if entry.is_dir())
    if has_checkpoints:
        return _of_run(folder, find_run(folder))
    weights = sorted(folder.glob("*.gguf"))
    if len(weights) == 1 and not (folder / "config.json").is_file():
        return ModelAddress(str(folder), (("gguf_file", weights[0].name),))
    return ModelAddress(str(folder))


def _of_run(folder: Path, run: Run) -> ModelAddress:
    """Return the last checkpoint of a run.

    Raises:
        QkovError: A later one cannot be read.
    """
    last = run.checkpoints[-1]
    path = Path(last.address)
    is_folder_itself = path.resolve() == folder.resolve()
    for name, reason in run.left_out.items():
        step = step_in(name)
        if step is None or name.startswith("tmp-") or not (folder / name).is_dir():
            continue
        if step.number > (last.step if last.step is not None else float("inf" if is_folder_itself else "-inf")):
            raise QkovError(
                f"the last checkpoint of {folder}, {name}, {reason}; mend or remove it, or give the address of another "
                f"one, such as {path}"
            )
    count = len(run.checkpoints)
    which = "its only checkpoint" if count == 1 else f"the last of its {count} checkpoints"
    own = "the model in the folder itself" if is_folder_itself else path.name
    left_out = "".join(f"; left out {name}, which {reason}" for name, reason in run.left_out.items())
    chosen = f"{folder} is a run: used {own} ({step_in_words(last.step, last.unit)}), {which}{left_out}"
    return ModelAddress(str(path), run=str(folder), chosen=chosen)
