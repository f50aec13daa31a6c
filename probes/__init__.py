"""Live models: hooks for notebooks and training loops."""

from .circuit_parameter_groups import CircuitParameterGroups, circuit_parameter_groups
from .circuit_rates import CircuitRates

__all__ = [
    "CircuitParameterGroups",
    "CircuitRates",
    "circuit_parameter_groups",
]
