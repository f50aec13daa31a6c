"""What an explanation says of itself: the model, the task, the settings, what was left out and why."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from ..tasks.example import Task
from ..trajectories.versions import versions
from .explanation_rows import MethodRows
from .explanation_settings import ExplanationSettings
from .faithfulness import Faithfulness
from .model import AttentionModel
from .relevance import RelevantAttention


def described(
    model: AttentionModel,
    task: Task,
    settings: ExplanationSettings,
    compared: bool,
    rows: MethodRows,
    faithful: Faithfulness,
    main: RelevantAttention | None,
) -> dict[str, Any]:
    """Return it as it comes back from JSON.

    Args:
        model: that was explained.
        task: in tokens.
        settings: of the explanation.
        compared: whether probabilities are those among an example's continuations.
        rows: of the methods.
        faithful: as measured.
        main: relevant-token attention of the main method; None where no example has a relevant token.
    """
    examples = task.in_tokens
    without = {"without a relevant token": len(examples)}
    kind = "classifier" if model.classifies else "causal language model" if model.causal else "masked language model"
    description = {
        "model": {
            "name": model.name,
            "kind": kind,
            "layers": model.layers,
            "heads": model.heads,
            "causal": model.causal,
            "context": model.context,
        },
        "task": {
            "name": task.name,
            "relevant": task.relevant,
            "classes": list(task.classes),
            "examples": len(examples),
            "cut_examples": sum(example.cut > 0 for example in examples),
            "attention_bins": list(task.attention_bins),
            "probability_bins": list(task.probability_bins),
        },
        "settings": asdict(settings) | {"convention": settings.convention, "main": settings.main},
        "probability": "classes" if model.classifies else "continuations" if compared else "vocabulary",
        "left_out": {
            "task": dict(task.left_out),
            "relevance": without if main is None else dict(main.left_out),
            "faithfulness": dict(faithful.left_out),
        },
        "integrated_gradients_delta": None if rows.deltas is None else float(np.abs(rows.deltas).max()),
        "versions": versions(),
    }
    return json.loads(json.dumps(description, allow_nan=False))
