"""Live models: hooks for notebooks and training loops."""

from .attention_probe import AttentionProbe
from .circuit_parameter_groups import CircuitParameterGroups, circuit_parameter_groups
from .circuit_rates import CircuitRates

__all__ = [
    "AttentionProbe",
    "CircuitParameterGroups",
    "CircuitRates",
    "circuit_parameter_groups",
]
