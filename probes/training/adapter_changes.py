"""What the adapters of a model in training make of its circuits, beside the weights without them."""

import warnings
from collections.abc import Iterable

from ...analyses.trajectories.view import View
from ...circuits.algebra.change import CHANGE_QUANTITIES, measure_change
from ...circuits.algebra.circuit import Circuit
from ...circuits.errors import QkovError
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.source import LayersInMemory
from .model import CircuitKey, LiveModel

#: The columns of the changes that adapters make.
ADAPTER_QUANTITIES = tuple(f"adapter_{name}" for name in CHANGE_QUANTITIES)


class AdapterChanges:
    """Measures the change of each circuit from the weights without adapters, also after the adapters were merged.

    For this it keeps a copy of the weights without adapters, as they were when the model was last measured with them.
    """

    def __init__(self, model: LiveModel, view: View) -> None:
        """Keep the model.

        Args:
            model: The model.
            view: The basis and the rotary offset.
        """
        self._model, self._view = model, view
        self._base: LayersInMemory | None = None
        self._is_told = False

    def quantities(self, layers: Iterable[AttentionWeights]) -> dict[CircuitKey, dict[str, list[object]]]:
        """Return the quantities of `measure_change` by circuit and column, one value for each head.

        The singular values are those that count for the rank. Nothing is returned for a model whose attention has had
        no adapters.

        Args:
            layers: The layers of the model as they are now, in the basis of the view.
        """
        precision = None
        try:
            base = self._model.base_layers()
        except QkovError as error:
            base = None
            if self._base is None and not self._is_told:
                self._is_told = True
                warnings.warn(f"the change that adapters make is not measured: {error}", stacklevel=2)
        if base is not None:
            self._base = LayersInMemory.copied(base.held)
        elif self._base is not None:
            # What was merged was rounded to the type of the weights.
            precision = self._model.precision()
        held = () if self._base is None else self._base.held
        of_base = {(weights.stack, weights.layer): weights for weights in held}
        return {
            (*key, name): _columns(circuit, base_circuits[name], precision)
            for weights in layers
            if (key := (weights.stack, weights.layer)) in of_base
            for base_circuits in [self._view.circuits(of_base[key])]
            for name, circuit in self._view.circuits(weights).items()
            if name in base_circuits
        }


def _columns(circuit: Circuit, base: Circuit, precision: float | None) -> dict[str, list[object]]:
    values = {name: value.tolist() for name, value in measure_change(circuit, base, precision).items()}
    spectra = zip(values["singular_values"], values["rank"], strict=True)
    values["singular_values"] = [s[: int(rank)] if rank == rank else s for s, rank in spectra]
    return {f"adapter_{name}": of_heads for name, of_heads in values.items()}
