"""Live models: hooks for notebooks and training loops."""

from .attention_probe import AttentionProbe
from .circuit_parameter_groups import CircuitParameterGroups, circuit_parameter_groups
from .circuit_probe import CircuitProbe
from .circuit_rates import CircuitRates

__all__ = [
    "AttentionProbe",
    "CircuitParameterGroups",
    "CircuitProbe",
    "CircuitRates",
    "circuit_parameter_groups",
]
