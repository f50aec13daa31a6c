"""The query-key and output-value circuits of transformers, read from weights and measured.

A circuit is the matrix that two weights of an attention head form together. The query-key circuit
W_QK = W_K W_Q^T decides where a head attends: the score between two tokens is x_key^T W_QK x_query. The output-value
circuit W_OV = W_O W_V decides what the head writes when it attends. qkov measures both through their factors and never
forms a matrix of size d_model x d_model unless you ask for one (`Circuit.dense`).

Orientation is the paper's (arXiv 2608.06776): the rows of W_QK are the key side and its columns the query side; the
rows of W_OV are the write side and its columns the read side. TransformerLens' `.QK` and `.OV` are the transposes.
Spectra, norms and all other results are float64.

Five things to do first:

1. Make circuits from your own tensors, here W_K and W_Q [head, d_model, d_head]:

       from qkov.circuits import Circuit
       W_QK = Circuit(W_K, W_Q.mT)
       W_QK.singular_values()  # [head, d_head]

2. Read a checkpoint. The address is a path, a URL or a hub id; no model is built and no pickled code runs:

       from qkov.circuits import open_checkpoint
       for weights in open_checkpoint("model/").layers():
           print(weights.layer, weights.qk().frobenius_norm(), weights.ov().frobenius_norm())

3. Find out what a checkpoint contains and how it was recognised:

       from qkov.circuits import inspect_checkpoint, open_checkpoint
       facts = inspect_checkpoint(open_checkpoint("model/"))
       facts["recognised"], facts["stacks"]

4. Read a model that is in memory, which is left unchanged:

       from qkov.circuits import open_model
       layers = list(open_model(model).layers())
       layers[0].qk("folded").singular_values()  # with the norm in front of attention folded into the weights

5. Measure everything at once, and apply the preconditioner Omega(C) = (C^T C)^(1/2) (+) (C C^T)^(1/2):

       from qkov.circuits import Preconditioner, measure
       measure(W_QK)  # a dictionary: norms, ranks, Omega's rates, imbalance, symmetry, copying score
       Preconditioner(W_QK).apply(gradient)  # (C C^T)^(1/2) G + G (C^T C)^(1/2)

The names in groups:

    The algebra of a circuit       Circuit, ThinSVD, measure, measure_change
    Its preconditioner             Preconditioner, Eigenvalues, agreement, Agreement, exact_step, imbalance
    The weights of one layer       AttentionWeights, AttentionFacts, Norm, HeadNorm, Rotary, Basis, BASES
    Circuits of several layers     composition_scores, LayerComposition
    A bound on scores              score_bound
    Reading checkpoints            open_checkpoint, OpenCheckpoint, inspect_checkpoint, find_checkpoints, Checkpoint
    How to read them               ReadingOptions, read_mapping, Mapping
    Reading live models            open_model, OpenHookedModel
    What both are                  AttentionSource (layers one after another, or side by side)
    What is raised                 QkovError (the work failed), CallError (the call was wrong)

Series of checkpoints are measured by `qkov.analyses.trajectories`, attention by `qkov.analyses.attention`, training
runs by `qkov.probes`. `qkov.circuits.__version__` is the version of all of them.
"""

from typing import TYPE_CHECKING

from .public_names import lazy_face

if TYPE_CHECKING:
    from .algebra.change import measure_change
    from .algebra.circuit import Circuit
    from .algebra.measure import measure
    from .algebra.preconditioner import Agreement, Eigenvalues, Preconditioner, agreement, exact_step, imbalance
    from .algebra.spectrum import ThinSVD
    from .architectures.mapping import Mapping, read_mapping
    from .checkpoints.runs import Checkpoint, find_checkpoints
    from .errors import CallError, QkovError
    from .live.hooked_models import OpenHookedModel
    from .live.models import open_model
    from .reading.checkpoint import OpenCheckpoint, open_checkpoint
    from .reading.inspection import inspect_checkpoint
    from .reading.options import ReadingOptions
    from .version import __version__
    from .weights.attention_weights import AttentionFacts, AttentionWeights
    from .weights.composition import LayerComposition, composition_scores
    from .weights.norms import BASES, Basis, HeadNorm, Norm
    from .weights.rotary import Rotary
    from .weights.score_bound import score_bound
    from .weights.source import AttentionSource

__all__ = [
    "BASES",
    "Agreement",
    "AttentionFacts",
    "AttentionSource",
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
    "ReadingOptions",
    "Rotary",
    "ThinSVD",
    "__version__",
    "agreement",
    "composition_scores",
    "exact_step",
    "find_checkpoints",
    "imbalance",
    "inspect_checkpoint",
    "measure",
    "measure_change",
    "open_checkpoint",
    "open_model",
    "read_mapping",
    "score_bound",
]

__getattr__, __dir__ = lazy_face(__name__)
