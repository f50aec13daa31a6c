"""The circuits at one moment: a table of one checkpoint, or of a model in memory."""

from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from ...circuits.architectures.mapping import Mapping
from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.errors import CallError
from ...circuits.live.lens_models import open_address
from ...circuits.live.models import open_model
from ...circuits.reading.options import ReadingKeywords, ReadingOptions, reading_options
from ...circuits.weights.source import AttentionSource
from .measuring import checkpoint_rows
from .motion import MOTION
from .store import table_of
from .view import Opened, View

#: The columns that only a series of checkpoints has.
_OF_A_RUN = ("source", "step", "stated_step", "previous_step", "reference", "effective_ratio", *MOTION)


def circuit_table(
    source: Any,
    *,
    basis: str = "raw",
    rotary_offset: int = 0,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ReadingKeywords],
) -> pd.DataFrame:
    """Return all quantities of every circuit: a row for each stack, layer, head and circuit, as `track` stores them.

    Args:
        source: The address of a checkpoint, what `open_checkpoint` or `open_model` returned, or a model in memory.
        basis: raw, folded or folded_centred.
        rotary_offset: Query position minus key position, for W_QK of layers with rotary positions.
        options: How to read a source that is not open yet, as one object. A Mapping stands for
            `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: any field of `ReadingOptions`.

    Returns:
        The table, with the columns of `RunStore.table` that do not compare checkpoints.

    Raises:
        CallError: There is no such checkpoint, basis or offset, or the source is already open and comes with options.
        QkovError: The source cannot be read, or is not recognised.
    """
    chosen = reading_options(options, reading)
    opened = opened_source(source, chosen)
    view = View.of(basis, rotary_offset)
    view.demand_possible(opened, opened.address)
    rows = checkpoint_rows(Opened(Checkpoint(None, opened.address), opened), None, None, None, view, opened.address)
    return table_of(rows).drop(columns=[column for column in _OF_A_RUN if column in rows[0]])


def opened_source(source: Any, options: ReadingOptions) -> AttentionSource:
    """Open a checkpoint or a model, unless it is open already.

    Args:
        source: The address of a checkpoint, what `open_checkpoint` or `open_model` returned, or a model in memory.
        options: How to read a source that is not open yet.

    Raises:
        CallError: There is no such checkpoint, or the source is already open and comes with options.
        QkovError: The source cannot be read, or is not recognised.
    """
    if isinstance(source, (str, Path)):
        return open_address(source, options)
    if not isinstance(source, AttentionSource):
        return open_model(source, options)
    if options == ReadingOptions():
        return source
    raise CallError("the source is already open, so options for reading have no effect; give them where it is opened")
