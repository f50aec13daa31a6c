"""Live models: hooks for notebooks and training loops."""

from typing import TYPE_CHECKING, Any

from .attention_probe import AttentionProbe
from .circuit_parameter_groups import CircuitParameterGroups, circuit_parameter_groups
from .circuit_probe import CircuitProbe
from .circuit_rates import CircuitRates

if TYPE_CHECKING:
    from .trainer_callback import CircuitProbeCallback

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
        from .trainer_callback import CircuitProbeCallback

        return CircuitProbeCallback
    raise AttributeError(f"module {__name__} has no attribute {name}")
