"""Audit a run: read its checkpoints, or what a store noted of them, and say whether the series is what it claims."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from ....circuits.architectures.mapping import Mapping
from ....circuits.checkpoints.runs import Checkpoint, find_run
from ....circuits.errors import CallError, QkovError
from ....circuits.live.lens_models import open_run_checkpoint
from ....circuits.reading.options import ReadingKeywords, ReadingOptions, reading_options
from ....circuits.storage.address import place_of
from ....circuits.storage.places import LocalPlace
from ....circuits.weights.content import layer_content
from ..store import CONTENTS, RunStore
from .contents import content_columns
from .result import Integrity, integrity_of

#: Why a step of a store is unknown.
NOT_NOTED = "the store does not hold the content of its weights, which earlier versions did not note."


def audit(
    run: Path | str,
    *,
    revisions: str | None = None,
    step: str | Sequence[str] | None = None,
    progress: Callable[[int, int, int | None], None] | None = None,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ReadingKeywords],
) -> Integrity:
    """Say whether a series of checkpoints is what it claims to be.

    Every attention tensor of the run is read once, one layer at a time, and nothing is measured. Of a run store, what
    it noted as it was made is used, and no checkpoint is read.

    Found are checkpoints that are identical to the bit, layers that are identical in several checkpoints though not in
    all, checkpoints that are farther from their neighbours than these are from each other, and checkpoints with other
    layers than the rest. A layer that is identical in all checkpoints is frozen, which is stated and is not a finding.

    Args:
        run: A folder of checkpoints (a path, an address that fsspec knows, or a hub id), or the folder of a run store.
        revisions: A pattern for the revisions of a model on the hub that are its checkpoints, such as `step*`.
        step: Where the step is in unusual names, such as `A_1_1_{step}.pt`, as for `track`.
        progress: Called after each checkpoint with the number read, the number of all, and its step.
        options: How to read the checkpoints, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: any field of `ReadingOptions`.

    Returns:
        What was checked, what was found, and what is unknown: among others, the checkpoints that cannot be read.

    Raises:
        CallError: The run does not exist, or it is a store that notes no contents, or comes with options.
        QkovError: No checkpoint can be read.
    """
    chosen = reading_options(options, reading)
    store = RunStore(run)
    if store.exists():
        if revisions is not None or step is not None or chosen != ReadingOptions():
            raise CallError(f"{run} is a run store, of which no checkpoint is read; leave out options for reading")
        return audit_store(store)
    found_run = find_run(run, revisions, chosen.patterns(step), chosen.series)
    return replace(audit_checkpoints(found_run.checkpoints, chosen, progress), left_out=found_run.left_out)


def audit_checkpoints(
    checkpoints: list[Checkpoint],
    options: ReadingOptions,
    progress: Callable[[int, int, int | None], None] | None = None,
) -> Integrity:
    """Audit checkpoints that were found; each is read once, one layer at a time.

    Args:
        checkpoints: The checkpoints of a run, in order.
        options: How to read them.
        progress: Called after each checkpoint with the number read, the number of all, and its step.

    Raises:
        CallError: The options do not go together.
        QkovError: No checkpoint can be read.
    """
    tables: list[pd.DataFrame] = []
    unknown: dict[int, str] = {}
    for position, checkpoint in enumerate(checkpoints):
        try:
            tables.append(_contents(checkpoint, options))
        except QkovError as error:
            # A wrong call is wrong at the first checkpoint already.
            is_call = isinstance(error, CallError) and position == 0
            if is_call or checkpoint.step is None or len(unknown) + 1 == len(checkpoints):
                raise
            unknown[checkpoint.step] = str(error)
        if progress is not None:
            progress(position + 1, len(checkpoints), checkpoint.step)
    return integrity_of(pd.concat(tables), unknown, checkpoints[0].unit)


def audit_store(store: RunStore) -> Integrity:
    """Audit a run by what its store noted of the contents of its layers.

    Args:
        store: The store.

    Raises:
        CallError: It is not a run store, or notes no contents.
        QkovError: A file is damaged.
    """
    description = store.description()
    contents = store.contents()
    if contents.empty:
        of_run = "" if description.get("live") else f": qkov audit {description['source']}"
        raise CallError(
            f"{store.folder} does not hold the content of any layer's weights, which neither probes nor earlier "
            f"versions note; audit the checkpoints themselves{of_run}"
        )
    return store_integrity(store, contents)


def store_integrity(store: RunStore, contents: pd.DataFrame) -> Integrity:
    """Return what the contents in a store say, with the steps of the run of which they are unknown.

    Args:
        store: The store.
        contents: What `RunStore.contents` returned.
    """
    measured, known = {step for step in store.steps() if step is not None}, set(contents["step"])
    description = store.description()
    listed = {checkpoint["step"] for checkpoint in description["checkpoints"]}
    expected = {step for step in listed if step is not None}
    unknown: dict[int, str] = dict.fromkeys(sorted(measured - known), NOT_NOTED)
    unknown |= dict.fromkeys(sorted(expected - measured), "the store does not hold it.")
    return replace(integrity_of(contents, unknown, description.get("unit", "step")), left_out=description["left_out"])


def bytes_on_this_machine(checkpoints: list[Checkpoint]) -> int | None:
    """Return how large the files of weights of some checkpoints are together; None if some are on another machine.

    Args:
        checkpoints: The checkpoints.

    Raises:
        QkovError: A file cannot be found.
    """
    if not all(isinstance(place_of(checkpoint.address), LocalPlace) for checkpoint in checkpoints):
        return None
    return sum(place.size() or 0 for checkpoint in checkpoints for place in checkpoint.weight_places())


def _contents(checkpoint: Checkpoint, options: ReadingOptions) -> pd.DataFrame:
    opened = open_run_checkpoint(checkpoint, options)
    layers = [layer_content(weights) for weights in opened.layers()]
    columns: dict[str, Any] = content_columns(layers, checkpoint.step, checkpoint.address)
    return pd.DataFrame(columns, columns=CONTENTS.names)
