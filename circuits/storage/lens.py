"""TransformerLens' names of models on the hub, as addresses: `lens:pythia-70m`, `lens:pythia-70m@1000` for a step."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from io import StringIO

from ..errors import CallError, QkovError
from .hub_answers import asked, files_in, full_name

PREFIX = "lens:"
#: How the revision of a checkpoint is named, by the beginning of a model's official name.
_REVISIONS = {"EleutherAI/pythia": "step{}", "stanford-crfm/": "checkpoint-{}"}
#: The owners of repositories in TransformerLens' own format, whose checkpoints are files.
_OWN_FORMAT = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
_FINAL = "final.pth"
_OWN_CHECKPOINT = re.compile(r"checkpoints/.*_(\d+)\.pth")


@dataclass(frozen=True)
class LensModel:
    """A model that TransformerLens knows, or one of its checkpoints.

    Attributes:
        name: The name as it was typed.
        official: The name that TransformerLens gives as the official one, which is that of the hub.
        label: The label of a checkpoint; None for the model as it was published last.
    """

    name: str
    official: str
    label: int | None = None

    def __str__(self) -> str:
        """Return the address."""
        return f"{PREFIX}{self.name}" if self.label is None else f"{PREFIX}{self.name}@{self.label}"

    @property
    def in_own_format(self) -> bool:
        """Whether the weights are in TransformerLens' own format, of which only TransformerLens knows the layout."""
        return self.official.startswith(_OWN_FORMAT)

    @property
    def revision(self) -> str | None:
        """The revision of the checkpoint on the hub; None for the model as it was published last."""
        if self.label is None:
            return None
        form = next((form for start, form in _REVISIONS.items() if self.official.startswith(start)), None)
        if form is None:
            raise QkovError(f"how the revisions of {self.official} are named is not known, so {self} cannot be found")
        return form.format(self.label)

    def hub_address(self, files: list[str] | None = None) -> str:
        """Return the address of the files on the hub.

        Args:
            files: The paths of the model's files, if they were listed already.

        Raises:
            QkovError: The hub does not answer, or has no such model or no such file.
        """
        if not self.in_own_format:
            revision = "" if self.revision is None else f"@{self.revision}"
            return f"hf://{full_name(self.official)}{revision}"
        return f"hf://{self.official}/{self._own_file(files or files_in(self.official))}"

    def _own_file(self, files: list[str]) -> str:
        """Return the file of weights in TransformerLens' own format."""
        if self.label is None:
            file = next((file for file in files if file.endswith(_FINAL)), None)
        else:
            file = next((file for file in files if _label_of(file) == self.label), None)
        if file is None:
            what = f"that ends in {_FINAL}" if self.label is None else f"of checkpoint {self.label}"
            raise QkovError(f"{self.official} has no file {what}, so {self} cannot be read")
        return file

    def demand_own_file(self) -> None:
        """Refuse a checkpoint of which TransformerLens would load the file of another one.

        TransformerLens takes the first file whose name ends in the label, so that 200 may be 1200.

        Raises:
            QkovError: It would, or the hub does not answer.
        """
        if not self.in_own_format or self.label is None:
            return
        ending = f"{self.label}.pth"
        loaded = next((file for file in files_in(self.official) if file.endswith(ending)), None)
        if loaded is None or _label_of(loaded) != self.label:
            raise QkovError(
                f"{self} cannot be read: TransformerLens loads the first file of {self.official} that ends in "
                f"{ending}, which is {loaded}, that of another checkpoint"
            )


def is_lens(address: object) -> bool:
    """Return whether an address is a name of TransformerLens."""
    return isinstance(address, str) and address.startswith(PREFIX)


def lens_model(address: str) -> LensModel:
    """Return the model that an address `lens:NAME` or `lens:NAME@LABEL` names. TransformerLens is imported.

    Raises:
        CallError: TransformerLens knows no such name, or the label is not a whole number.
    """
    name, mark, label = address.removeprefix(PREFIX).partition("@")
    with quiet():
        from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    by_name: dict[str, str] = {}
    shown: dict[str, str] = {}
    for official in OFFICIAL_MODEL_NAMES:
        names = (*MODEL_ALIASES.get(official, ()), official)
        by_name |= {known.lower(): official for known in names}
        shown |= {known.lower(): known for known in names}
    official = by_name.get(name.lower())
    if official is None:
        close = [shown[match] for match in get_close_matches(name.lower(), shown, n=5)]
        hint = f"names like it are {', '.join(close)}" if close else "expected a name such as pythia-70m or gpt2-small"
        raise CallError(
            f"TransformerLens knows no model {name!r}; {hint}; a model of the hub by its own id has no lens:"
        )
    if mark and not label.isdecimal():
        raise CallError(f"{address} should end in the label of a checkpoint, such as @1000; got @{label}")
    return LensModel(name, official, int(label) if mark else None)


def lens_checkpoints(model: LensModel) -> tuple[list[LensModel], str]:
    """Return the checkpoints that TransformerLens lists for a model, in order, and what their labels count.

    Args:
        model: The model, or one of its checkpoints, which then has to be listed.

    Raises:
        CallError: TransformerLens lists no checkpoints of the model, or not this one.
        QkovError: The hub, which keeps the list of some models, does not answer.
    """
    labels, unit = asked(model.official, lambda: _labels(model))
    if model.label is not None and model.label not in labels:
        raise CallError(
            f"{model} is not listed by TransformerLens, which lists {len(labels)} checkpoints of {model.official}, "
            f"from {unit} {labels[0]} to {labels[-1]}"
        )
    chosen = labels if model.label is None else [model.label]
    return [LensModel(model.name, model.official, label) for label in chosen], unit


def _labels(model: LensModel) -> tuple[list[int], str]:
    with quiet():
        try:
            labels, unit = _listing()(model.official)
        except (ValueError, IndexError) as error:
            if isinstance(error, ValueError) and "not checkpointed" not in str(error):
                raise
            labels, unit = [], ""
    if not labels:
        raise CallError(
            f"TransformerLens lists no checkpoints of {model.name} ({model.official}), so there is no run to follow; "
            f"qkov inspect and qkov explain take the model itself"
        )
    return sorted(set(labels)), unit


def _listing() -> Callable[[str], tuple[list[int], str]]:
    """Return the function of TransformerLens that lists checkpoints, which moved in version 4."""
    try:
        from transformer_lens.tools.model_registry.checkpoints import get_checkpoint_labels
    except ImportError:
        from transformer_lens.loading_from_pretrained import (  # pyright: ignore[reportMissingImports]
            get_checkpoint_labels,
        )
    return get_checkpoint_labels


def _label_of(file: str) -> int | None:
    match = _OWN_CHECKPOINT.fullmatch(file)
    return None if match is None else int(match[1])


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what TransformerLens prints, logs and warns of from the terminal, and leave the loggers as they were."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    handlers, disabled, bars = logging.root.handlers[:], logging.root.manager.disable, not are_progress_bars_disabled()
    logging.disable(logging.CRITICAL)
    disable_progress_bars()
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        # A call of logging.warning gives the root logger a handler if it has none.
        logging.root.handlers[:] = handlers
        if bars:
            enable_progress_bars()
