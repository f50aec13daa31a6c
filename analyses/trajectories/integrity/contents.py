"""The contents of a run's layers as a table: what a store holds, and what is read from the checkpoints themselves."""

from collections.abc import Iterable
from typing import Any

from ....circuits.visible_text import visible
from ....circuits.weights.content import LayerContent


def content_columns(contents: Iterable[LayerContent], step: int | None, source: str) -> dict[str, Any]:
    """Return the contents of a checkpoint's layers as the columns of `RunStore.contents`.

    Args:
        contents: The contents of the layers.
        step: The step of the checkpoint.
        source: The name of the run, stored in every row.
    """
    layers = list(contents)
    return {
        "source": [visible(source)] * len(layers),
        "step": [step] * len(layers),
        "stack": [each.stack for each in layers],
        "layer": [each.layer for each in layers],
        "shapes": [each.shapes for each in layers],
        "digest": [each.digest for each in layers],
        "sketch": [each.sketch.tolist() for each in layers],
    }
