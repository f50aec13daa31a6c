"""The circuits of one checkpoint, or of a model in memory, as a table."""

from pathlib import Path
from typing import Any

import pandas as pd

from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.live.hooked_models import OpenHookedModel
from ...circuits.live.models import open_model
from ...circuits.reading.checkpoint import OpenCheckpoint
from ...circuits.reading.options import open_checkpoint
from ...circuits.weights.source import LayersInMemory
from .measuring import checkpoint_rows
from .motion import MOTION
from .store import table_of
from .view import Opened, View

#: What only a series of checkpoints has.
_OF_A_RUN = ("source", "step", "previous_step", "reference", "effective_ratio", *MOTION)


def circuit_table(source: Any, *, basis: str = "raw", rotary_offset: int = 0) -> pd.DataFrame:
    """Return every figure of every circuit: a row for each stack, layer, head and circuit, as `track` stores them.

    Args:
        source: the address of a checkpoint, what `open_checkpoint` or `open_model` returned, or a model in memory.
        basis: raw, folded or folded_centred.
        rotary_offset: of W_QK, query position less key position, in layers with rotary positions.

    Raises:
        CallError: there is no such checkpoint, basis or offset.
        QkovError: it cannot be read, or is not recognised.
    """
    if isinstance(source, (str, Path)):
        opened = open_checkpoint(source)
    elif isinstance(source, (OpenCheckpoint, OpenHookedModel)):
        opened = source
    else:
        opened = open_model(source)
    layers = opened if isinstance(opened, OpenCheckpoint) else LayersInMemory(tuple(opened.layers()))
    view = View.of(basis, rotary_offset)
    name = opened.file.address if isinstance(opened, OpenCheckpoint) else opened.recognised
    view.demand_possible(layers, name)
    rows = checkpoint_rows(Opened(Checkpoint(0, name), layers), None, None, None, view, name)
    return table_of(rows).drop(columns=[column for column in _OF_A_RUN if column in rows[0]])
