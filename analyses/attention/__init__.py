"""Where attention goes, and whether it is faithful to what the model does."""

from .alternatives import Target
from .attention_flow import attention_flow
from .attribution import METHODS, Attributions, attribute
from .dtap import Dtap, dtap, dtap_differences, dtap_grid
from .explanation import Explanation, explain
from .explanation_files import read_explanation, write_explanation
from .explanation_settings import ExplanationSettings
from .faithfulness import Faithfulness, faithfulness
from .gradient_rollout import gradient_rollout
from .head_relevance import HeadRelevance
from .intervals import Bootstrap
from .loading import load_model
from .measures import MEASURES
from .model import AttentionModel, Batch
from .perturbation import ERASER, PAPER, Perturbation
from .plausibility import Plausibility, Rationales, plausibility
from .predictions import predictions
from .readout_rows import last_layer, layer_mean, readout_rows
from .relevance import Relevance, RelevantAttention, relevance_of
from .relevance_figures import Thresholds, relevance_differences, relevance_summary
from .relevant_tokens import Counting
from .rollout import FusedMaps, rollout
from .rollout_settings import Rollout
from .single_layer_models import SingleLayerModel
from .task_fitting import fit_task
from .tokenisers import load_tokeniser
from .value_norms import value_norms

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
