"""Weights to circuits: the algebra of factored matrices, and checkpoint reading."""

from .attention_weights import AttentionFacts, AttentionWeights
from .checkpoints import Checkpoint, find_checkpoints
from .composition import LayerComposition, composition_scores
from .errors import CallError, QkovError
from .factored import Circuit
from .hooked_models import OpenHookedModel
from .inspection import inspect_checkpoint
from .live_models import open_model
from .mapping import Mapping, read_mapping
from .norms import BASES, Basis, HeadNorm, Norm
from .preconditioner import Agreement, Eigenvalues, Preconditioner, agreement, exact_step, imbalance
from .reading import OpenCheckpoint, open_checkpoint
from .rotary import Rotary
from .scales import measure
from .spectrum import ThinSVD

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
