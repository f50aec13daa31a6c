"""Where attention goes, and whether it is faithful to what the model does."""

from .explanation.explanation import Explanation, explain
from .explanation.files import read_explanation, write_explanation
from .explanation.settings import ExplanationSettings
from .intervals import Bootstrap
from .measures.attention_flow import attention_flow
from .measures.gradient_rollout import gradient_rollout
from .measures.readout_rows import last_layer, layer_mean, readout_rows
from .measures.registry import MEASURES
from .measures.rollout import FusedMaps, Rollout, rollout
from .measures.value_norms import value_norms
from .models.alternatives import Target
from .models.loading import load_model
from .models.model import AttentionModel, Batch
from .models.predictions import predictions
from .models.single_layer import SingleLayerModel
from .models.task_fitting import fit_task
from .models.tokenisers import load_tokeniser
from .rationales.attribution import METHODS, Attributions, attribute
from .rationales.faithfulness import Faithfulness, faithfulness
from .rationales.perturbation import ERASER, PAPER, Perturbation
from .rationales.plausibility import Plausibility, Rationales, plausibility
from .relevance.dtap import Dtap, dtap, dtap_differences, dtap_grid
from .relevance.figures import Thresholds, relevance_differences, relevance_summary
from .relevance.heads import HeadRelevance
from .relevance.relevance import Relevance, RelevantAttention, relevance_of
from .relevance.relevant_tokens import Counting

__all__ = [
    "ERASER",
    "MEASURES",
    "METHODS",
    "PAPER",
    "AttentionModel",
    "Attributions",
    "Batch",
    "Bootstrap",
    "Counting",
    "Dtap",
    "Explanation",
    "ExplanationSettings",
    "Faithfulness",
    "FusedMaps",
    "HeadRelevance",
    "Perturbation",
    "Plausibility",
    "Rationales",
    "Relevance",
    "RelevantAttention",
    "Rollout",
    "SingleLayerModel",
    "Target",
    "Thresholds",
    "attention_flow",
    "attribute",
    "dtap",
    "dtap_differences",
    "dtap_grid",
    "explain",
    "faithfulness",
    "fit_task",
    "gradient_rollout",
    "last_layer",
    "layer_mean",
    "load_model",
    "load_tokeniser",
    "plausibility",
    "predictions",
    "read_explanation",
    "readout_rows",
    "relevance_differences",
    "relevance_of",
    "relevance_summary",
    "rollout",
    "value_norms",
    "write_explanation",
]
