"""One run of a model on a batch from which several measures are computed."""

from jaxtyping import Float
from torch import Tensor

from ....circuits.errors import CallError
from ..models.model import AttentionModel, Batch, InputSink, MapSink
from .readout_rows import ReadoutRows
from .rollout import FusedMaps, Rollout
from .value_norms import ValueNorms


class SharedRun:
    """One run of a model on a batch, without gradients, whose attention maps several measures share.

    Before the run a measure names the collectors that it needs; each collector exists once, however many measures name
    it. After the run the collectors hold what they kept of every layer's map. A measure with a collector of its own
    passes it to `watch`.

    Attributes:
        model: the model that runs.
        batch: examples.
        rollout: how heads are fused, how much of the identity is mixed in, and which layers take part.
        readout: readout position of each example, [batch].
        heads: collector of every head's row at the readout position; always present.
    """

    def __init__(self, model: AttentionModel, batch: Batch, rollout: Rollout) -> None:
        """Prepare a run.

        Args:
            model: the model to run.
            batch: examples.
            rollout: settings of the measures.

        Raises:
            CallError: The settings do not fit the model.
        """
        rollout.demand_fit(model)
        self.model, self.batch, self.rollout = model, batch, rollout
        self.readout = model.reading_positions(batch)
        self.heads = ReadoutRows(batch.mask, self.readout)
        self._maps: list[MapSink] = [self.heads]
        self._inputs: list[InputSink] = []
        self._fused_maps: FusedMaps | None = None
        self._fused_norms: FusedMaps | None = None
        self._has_run = False

    def fused_maps(self) -> FusedMaps:
        """Return the collector of fused attention maps."""
        if self._fused_maps is None:
            self._fused_maps = FusedMaps(self.batch.mask, self.rollout)
            self.watch(self._fused_maps)
        return self._fused_maps

    def fused_norms(self) -> FusedMaps:
        """Return the collector of value norms, one map for each layer.

        Raises:
            CallError: A layer has no OV circuit.
        """
        if self._fused_norms is None:
            self._fused_norms = FusedMaps(self.batch.mask, self.rollout)
            norms = ValueNorms(self.model.attention_weights(), self._fused_norms)
            self.watch(norms.maps, norms.inputs)
        return self._fused_norms

    def watch(self, maps: MapSink, inputs: InputSink | None = None) -> None:
        """Register a collector.

        Args:
            maps: receives each layer's attention map.
            inputs: receives what each layer's attention reads; None if that is not needed.

        Raises:
            CallError: The model has run already.
        """
        if self._has_run:
            raise CallError("the model has run already; register collectors before the run")
        self._maps.append(maps)
        if inputs is not None:
            self._inputs.append(inputs)

    def run(self) -> None:
        """Run the model and pass its attention maps to all collectors."""
        self._has_run = True
        self.model.watch(self.batch, self._to_maps, self._to_inputs if self._inputs else None)

    def _to_maps(self, layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        for sink in self._maps:
            sink(layer, attention)

    def _to_inputs(self, layer: int, read: Float[Tensor, "batch position d_model"]) -> None:
        for sink in self._inputs:
            sink(layer, read)
