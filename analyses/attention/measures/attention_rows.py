"""The rows of several measures, and of every head, from one run of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float64, Int
from torch import Tensor

from ....circuits.errors import CallError
from ..models.model import AttentionModel, Batch
from .fusion import named_fusion
from .registry import MEASURES, Rows, streamed_measures
from .rollout import ABNAR_ZUIDEMA, Rollout
from .shared_run import SharedRun


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """The results of one run of the model on a batch.

    Attributes:
        measures: by name, the rows that the measures in `MEASURES` return.
        heads: row of every head at the readout position.
        readout: readout position of each example.
    """

    measures: dict[str, Float64[Tensor, "batch position"]]
    heads: Float64[Tensor, "batch layer head position"]
    readout: Int[Tensor, " batch"]


def attention_rows(
    model: AttentionModel, batch: Batch, measures: Sequence[str] | None = None, settings: Rollout = ABNAR_ZUIDEMA
) -> AttentionRows:
    """Run the model once and return the rows of all requested measures.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        measures: names of measures that can share a run; None for all of these.
        settings: how heads are fused, in every measure that fuses them, and how maps are rolled out.

    Raises:
        CallError: A measure is unknown or runs the model itself, or the settings do not fit the model.
        QkovError: The model's attention is not finite, or fuses to nothing.
    """
    names = streamed_measures() if measures is None else tuple(measures)
    named_fusion(settings.heads)
    run = SharedRun(model, batch, settings)
    results: dict[str, Callable[[], Rows]] = {}
    for name in names:
        stream = MEASURES[name].streamed
        if stream is None:
            raise CallError(f"{name} runs the model itself; one shared run gives {', '.join(streamed_measures())}")
        results[name] = stream(run)
    run.run()
    return AttentionRows({name: rows() for name, rows in results.items()}, run.heads.rows(), run.readout)
