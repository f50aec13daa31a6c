"""Models by the names of TransformerLens: read from their files if they are safetensors, else as it loads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoints.files import CheckpointFiles
from ..checkpoints.runs import Checkpoint, lens_checkpoint
from ..errors import CallError, named_input
from ..reading.checkpoint import OpenCheckpoint, open_checkpoint
from ..reading.options import ReadingOptions
from ..storage.lens import LensModel, is_lens, quiet
from .hooked_models import OpenHookedModel
from .models import open_model

_READ_BY_RANGE = (".safetensors", ".safetensors.index.json")


def load_lens_model(model: LensModel) -> Any:
    """Return a model as TransformerLens loads it, without processing its weights.

    It is a TransformerBridge; for TransformerLens' own format before version 4, a HookedTransformer.

    Args:
        model: The model, or one of its checkpoints.

    Raises:
        QkovError: TransformerLens cannot load it, or the hub cannot be reached.
    """
    model.demand_own_file()
    remedy = f"check the connection and that {model.official} is on the hub"
    with named_input(model, "a model of TransformerLens", remedy), quiet(), _without_bars():
        return _loader(model)(model.official, checkpoint_value=model.label, device="cpu")


def _loader(model: LensModel) -> Any:
    import transformer_lens
    from transformer_lens.model_bridge import TransformerBridge

    kinds: Any = transformer_lens
    bridge: Any = TransformerBridge
    if not model.in_own_format:
        return bridge.boot_transformers
    # Bridges load TransformerLens' own format from version 4 on, when HookedTransformer is gone.
    if hasattr(bridge, "boot_tl_legacy"):
        return bridge.boot_tl_legacy
    return kinds.HookedTransformer.from_pretrained_no_processing


def open_run_checkpoint(
    checkpoint: Checkpoint, options: ReadingOptions, files: CheckpointFiles | None = None
) -> OpenCheckpoint | OpenHookedModel:
    """Open a checkpoint of a run from its files, or, if TransformerLens names it, as TransformerLens loads it.

    The files of a model that TransformerLens names are read where they are safetensors, of which only the attention
    weights are fetched.

    Args:
        checkpoint: The checkpoint.
        options: How to read it.
        files: The files to open, in place of the checkpoint's own.

    Raises:
        CallError: The options do not go together, or TransformerLens loads the checkpoint and they have no effect.
        QkovError: The checkpoint cannot be read.
    """
    files = checkpoint.files if files is None else files
    model = checkpoint.lens
    if model is None or (files.weights.name.endswith(_READ_BY_RANGE) and not model.in_own_format):
        return open_checkpoint(files, options)
    if options.are_given:
        raise CallError(
            f"{model} has no safetensors, so TransformerLens loads it, and mapping, family, heads and prefix have no "
            f"effect; leave them out"
        )
    opened = open_model(load_lens_model(model))
    opened.address = str(model)
    return opened


def open_address(address: Path | str, options: ReadingOptions) -> OpenCheckpoint | OpenHookedModel:
    """Open a checkpoint at any address, also one that TransformerLens names.

    Args:
        address: A path, an address, a hub id, or `lens:NAME`.
        options: How to read it.

    Raises:
        CallError: There is no such checkpoint, or the options do not go together.
        QkovError: It cannot be read.
    """
    if is_lens(address):
        return open_run_checkpoint(lens_checkpoint(str(address)), options)
    return open_checkpoint(address, options)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the bars that transformers shows while it loads weights from the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
