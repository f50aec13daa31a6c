"""Attention rollout: how much of each input token reaches a place through all layers of attention."""

from jaxtyping import Float64
from torch import Tensor

from .fused_maps import FusedMaps
from .model import AttentionModel, Batch
from .rollout_settings import ABNAR_ZUIDEMA, Rollout
from .watching import watch


def rollout(
    model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA
) -> Float64[Tensor, "batch position"]:
    """Return the rollout's row where each example's prediction is read; rows sum to 1.

    Raises:
        CallError: the settings do not fit the model.
        QkovError: the model's attention is not finite, or fuses to nothing.
    """
    return fused_maps(model, batch, settings).row(model.reading_positions(batch))


def fused_maps(model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA) -> FusedMaps:
    """Run the model and keep one fused map a layer.

    Raises:
        CallError: the settings do not fit the model.
    """
    settings.demand_fit(model)
    maps = FusedMaps(batch.mask, settings)
    watch(model, batch, maps)
    return maps
