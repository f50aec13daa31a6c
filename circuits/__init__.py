"""Weights to circuits: the algebra of factored matrices, and checkpoint reading."""

from .algebra.circuit import Circuit
from .algebra.measure import measure
from .algebra.preconditioner import Agreement, Eigenvalues, Preconditioner, agreement, exact_step, imbalance
from .algebra.spectrum import ThinSVD
from .architectures.mapping import Mapping, read_mapping
from .checkpoints.runs import Checkpoint, find_checkpoints
from .errors import CallError, QkovError
from .live.hooked_models import OpenHookedModel
from .live.models import open_model
from .reading.checkpoint import OpenCheckpoint
from .reading.inspection import inspect_checkpoint
from .reading.options import open_checkpoint
from .weights.attention_weights import AttentionFacts, AttentionWeights
from .weights.composition import LayerComposition, composition_scores
from .weights.norms import BASES, Basis, HeadNorm, Norm
from .weights.rotary import Rotary

__all__ = [
    "BASES",
    "Agreement",
    "AttentionFacts",
    "AttentionWeights",
    "Basis",
    "CallError",
    "Checkpoint",
    "Circuit",
    "Eigenvalues",
    "HeadNorm",
    "LayerComposition",
    "Mapping",
    "Norm",
    "OpenCheckpoint",
    "OpenHookedModel",
    "Preconditioner",
    "QkovError",
    "Rotary",
    "ThinSVD",
    "agreement",
    "composition_scores",
    "exact_step",
    "find_checkpoints",
    "imbalance",
    "inspect_checkpoint",
    "measure",
    "open_checkpoint",
    "open_model",
    "read_mapping",
]
