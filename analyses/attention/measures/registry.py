"""Rows of several measures of attention, and of every head, from one run of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Float64, Int
from torch import Tensor

from ....circuits.errors import CallError
from ..models.model import AttentionModel, Batch, MapSink
from .attention_flow import attention_flow, flow_rows
from .gradient_rollout import gradient_rollout
from .readout_rows import ReadoutRows, fuse_rows, last_layer, layer_mean
from .rollout import ABNAR_ZUIDEMA, FusedMaps, Rollout, rollout
from .value_norms import ValueNorms, value_norms

#: Rows sum to 1 over an example's tokens and are zero on padding; attention is read where the prediction is.
Measure = Callable[[AttentionModel, Batch], Float64[Tensor, "batch position"]]

#: With the settings of their sources; `functools.partial` gives others.
MEASURES: dict[str, Measure] = {
    "rollout": rollout,
    "attention flow": attention_flow,
    "last layer": last_layer,
    "layer mean": layer_mean,
    "value norms": value_norms,
    "gradient rollout": gradient_rollout,
}

#: Measures that need maps alone, and no gradients of them.
STREAMED = ("rollout", "attention flow", "last layer", "layer mean", "value norms")


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """What one run of the model on a batch gave.

    Attributes:
        measures: by name, the rows that the functions in `MEASURES` give.
        heads: the row of every head at the readout.
        readout: position of each example at which attention is read.
    """

    measures: dict[str, Float64[Tensor, "batch position"]]
    heads: Float64[Tensor, "batch layer head position"]
    readout: Int[Tensor, " batch"]


def attention_rows(
    model: AttentionModel, batch: Batch, measures: Sequence[str] = STREAMED, settings: Rollout = ABNAR_ZUIDEMA
) -> AttentionRows:
    """Run the model once and return the rows of all measures that were asked for.

    Args:
        model: whose attention it is.
        batch: of examples.
        measures: names in `STREAMED`.
        settings: how maps are fused and rolled out; how heads are fused holds for every measure.

    Raises:
        CallError: a measure is none of these, or the settings do not fit the model.
        QkovError: the model's attention is not finite, or fuses to nothing.
    """
    unknown = [name for name in measures if name not in STREAMED]
    if unknown:
        raise CallError(f"one run gives {', '.join(STREAMED)}; got {', '.join(unknown)}")
    fusion = settings.heads
    if not isinstance(fusion, str):
        raise CallError("weights of heads were given, and not every measure has heads apart; expected mean, max or min")
    settings.demand_fit(model)
    readout = model.reading_positions(batch)
    heads, fused, norms = (
        ReadoutRows(batch.mask, readout),
        FusedMaps(batch.mask, settings),
        FusedMaps(batch.mask, settings),
    )
    sinks: list[MapSink] = [heads]
    if {"rollout", "attention flow"} & set(measures):
        sinks.append(fused)
    values = ValueNorms(model.attention_weights(), norms) if "value norms" in measures else None
    if values is not None:
        sinks.append(values.maps)

    def to_all(layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        for sink in sinks:
            sink(layer, attention)

    model.watch(batch, to_all, None if values is None else values.inputs)
    rows = heads.rows()
    made = {
        "rollout": lambda: fused.row(readout),
        "attention flow": lambda: flow_rows(fused, readout),
        "last layer": lambda: fuse_rows(rows[:, -1:], fusion)[:, 0],
        "layer mean": lambda: fuse_rows(rows, fusion).mean(dim=1),
        "value norms": lambda: norms.row(readout),
    }
    return AttentionRows({name: made[name]() for name in measures}, rows, readout)
