"""Where a model's attention goes, and whether it is faithful to what the model does.

Attention is read at the readout position, the token at which the prediction is made, and compared with the tokens that
are known to be relevant. A model enters through `load_model`, examples enter through `qkov.analyses.tasks.load_task`:

    from qkov.analyses.attention import explain, fit_task, load_model, load_tokeniser, write_explanation
    from qkov.analyses.tasks import load_task

    model, tokenizer = load_model("model/"), load_tokeniser("model/")
    task = fit_task(load_task("agreement", limit=100), model, tokenizer)
    explanation = explain(model, task, tokeniser=tokenizer)  # tables of pandas
    write_explanation(explanation, "my-explanation")  # `qkov report my-explanation` renders the report

The names in groups:

    Models                      load_model, AttentionModel, SingleLayerModel, load_tokeniser, fit_task, Batch, Target,
                                predictions
    Measures of attention       MEASURES, Measure, MeasureSettings, rollout, Rollout, FusedMaps, attention_flow,
                                value_norms, gradient_rollout, last_layer, layer_mean, readout_rows
    Relevant tokens             relevance_of, Relevance, RelevantAttention, Counting, HeadRelevance, Thresholds,
                                relevance_summary, relevance_differences
    Attention and probability   dtap, Dtap, dtap_grid, dtap_differences
    Attributions                METHODS, attribute, Attributions
    Faithfulness                faithfulness, Faithfulness, Perturbation, ERASER, PAPER
    Rationales that people mark plausibility, Plausibility, Rationales
    All of it on one task       explain, Explanation, ExplanationSettings, write_explanation, read_explanation
    Intervals                   Bootstrap
"""

from typing import TYPE_CHECKING

from ...circuits.public_names import lazy_face

if TYPE_CHECKING:
    from .explanation.explanation import Explanation, explain
    from .explanation.files import read_explanation, write_explanation
    from .explanation.settings import ExplanationSettings
    from .intervals import Bootstrap
    from .measures.attention_flow import attention_flow
    from .measures.gradient_rollout import gradient_rollout
    from .measures.readout_rows import last_layer, layer_mean, readout_rows
    from .measures.registry import MEASURES, Measure, MeasureSettings
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
    from .relevance.heads import HeadRelevance
    from .relevance.relevance import Relevance, RelevantAttention, relevance_of
    from .relevance.relevant_tokens import Counting
    from .relevance.summary import Thresholds, relevance_differences, relevance_summary

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
    "Measure",
    "MeasureSettings",
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

__getattr__, __dir__ = lazy_face(__name__)
