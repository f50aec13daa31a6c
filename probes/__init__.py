"""Live models: hooks for notebooks and training loops."""

from typing import TYPE_CHECKING, Any

from .attention.probe import AttentionProbe
from .rates.circuit_rates import CircuitRates
from .rates.parameter_groups import CircuitParameterGroups, circuit_parameter_groups
from .training.circuit_probe import CircuitProbe

if TYPE_CHECKING:
    from .training.trainer_callback import CircuitProbeCallback

__all__ = [
    "AttentionProbe",
    "CircuitParameterGroups",
    "CircuitProbe",
    "CircuitProbeCallback",
    "CircuitRates",
    "circuit_parameter_groups",
]


def __getattr__(name: str) -> Any:
    """Load what needs transformers when it is asked for."""
    if name == "CircuitProbeCallback":
        from .training.trainer_callback import CircuitProbeCallback

        return CircuitProbeCallback
    raise AttributeError(f"module {__name__} has no attribute {name}")
