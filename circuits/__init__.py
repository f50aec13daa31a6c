"""Weights to circuits: the algebra of factored matrices, and checkpoint reading."""

from .errors import CallError, QkovError
from .factored import Circuit
from .preconditioner import Agreement, Eigenvalues, Preconditioner, agreement, exact_step, imbalance
from .scales import measure
from .spectrum import ThinSVD

__all__ = [
    "Agreement",
    "CallError",
    "Circuit",
    "Eigenvalues",
    "Preconditioner",
    "QkovError",
    "ThinSVD",
    "agreement",
    "exact_step",
    "imbalance",
    "measure",
]
