"""The report of `qkov explain`: where a model's attention goes on a task, and whether it is faithful."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...analyses.attention.explanation.explanation import Explanation
from ...analyses.attention.relevance.compared_runs import ALL_TOKENS
from ...analyses.attention.relevance.summary import DEFINITIONS
from .conventions import conventions
from .faithfulness_sections import curve_panels, method_section
from .marked_text import marked_text, most_attended
from .page import share, write_page
from .relevance_sections import dtap_panels, heads_section, relevant_attention

#: Maximum number of examples shown at each end.
_SHOWN = 4


def write_explain_report(explanation: Explanation, path: Path, command: str, folder: Path) -> Path:
    """Write the report of an explanation and return its path.

    Args:
        explanation: The explanation.
        path: The path of the HTML file.
        command: The command that renders the report.
        folder: The folder that holds the tables.

    Raises:
        CallError: The path cannot be written to.
    """
    described = explanation.description
    model, task, settings = described["model"], described["task"], described["settings"]
    return write_page(
        path,
        "explain.html.j2",
        title="Where attention goes, and whether it is faithful",
        subtitle=f"{model['name']} on {task['name']}, {task['examples']} examples",
        model=model,
        task=task,
        settings=settings,
        answers=_answers(explanation),
        relevance=relevant_attention(explanation),
        dtap=dtap_panels(explanation),
        dtap_definition=DEFINITIONS["DTAP"],
        heads=heads_section(explanation),
        methods=method_section(explanation),
        curves=curve_panels(explanation),
        examples=_examples(explanation),
        conventions=conventions(described),
        left_out=_left_out(described),
        versions=described["versions"],
        command=command,
        measured_by=described.get("command", command),
        folder=str(folder.resolve()),
    )


def explain_summary(explanation: Explanation) -> dict[str, Any]:
    """Return the results by which a model's attention is judged, in a form that JSON can hold."""
    described, methods, relevance = explanation.description, explanation.methods, explanation.relevance
    columns = ["value", "low", "high", "chance", "examples"]
    main = relevance
    if not relevance.empty:
        main = relevance[(relevance["method"] == described["settings"]["main"]) & (relevance["tokens"] == ALL_TOKENS)]
    return {
        "model": described["model"]["name"],
        "chosen_checkpoint": described["model"]["chosen_checkpoint"],
        "task": described["task"]["name"],
        "examples": described["task"]["examples"],
        "relevant_tokens": described["task"]["relevant"],
        **{name: described["task"][name] for name in ("pairs", "spaced_labels", "blank_labels")},
        "accuracy": _accuracy(explanation),
        "method": described["settings"]["main"],
        "convention": described["settings"]["convention"],
        "relevance": {str(row["metric"]): {name: row[name] for name in columns} for row in main.to_dict("records")},
        "methods": {
            str(method): {str(row["metric"]): {name: row[name] for name in columns} for row in rows.to_dict("records")}
            for method, rows in methods.groupby("method", sort=False)
        },
        "left_out": described["left_out"],
    }


def _accuracy(explanation: Explanation) -> float | None:
    correct = explanation.examples["correct"].dropna()
    return float(correct.mean()) if len(correct) else None


def _answers(explanation: Explanation) -> dict[str, Any]:
    """Return how well the model does the task."""
    right = explanation.examples["right"].dropna()
    return {
        "accuracy": _accuracy(explanation),
        "right": float(right.mean()) if len(right) else None,
        "known": len(right),
        "among": {
            "classes": "among the classes",
            "continuations": "among the given continuations",
            "vocabulary": "in the whole vocabulary",
        }[explanation.description["probability"]],
    }


def _examples(explanation: Explanation) -> list[dict[str, Any]]:
    """Return the examples at both ends, by attention on relevant tokens or, without those, by comprehensiveness."""
    table, main = explanation.examples, explanation.description["settings"]["main"]
    attention = table["attention"].dropna()
    if len(attention):
        order = attention.sort_values(ascending=False, kind="stable").index
        titles = ("Most attention on the relevant tokens", "Least attention on the relevant tokens")
    else:
        faithful = explanation.faithfulness
        ours = faithful[(faithful["method"] == main) & (faithful["order"] == "given")]
        order = ours.groupby("example")["comprehensiveness"].mean().sort_values(ascending=False, kind="stable").index
        titles = ("Removing the first tokens costs most", "Removing the first tokens costs least")
    shown = min(_SHOWN, -(-len(order) // 2))
    ends = (order[:shown], order[::-1][: min(shown, len(order) - shown)])
    tokens = dict(list(explanation.tokens.groupby("example")))
    return [
        {"title": title, "examples": [_example(table.loc[number], tokens[number], main) for number in numbers]}
        for title, numbers in zip(titles, ends, strict=True)
        if len(numbers)
    ]


def _example(row: pd.Series, tokens: pd.DataFrame, main: str) -> dict[str, Any]:
    pieces = marked_text(row["text"], tokens, main, None if pd.isna(row["pair"]) else row["pair"])
    known, known_attention = not pd.isna(row["correct"]), not np.isnan(row["attention"])
    return {
        "id": row["id"] or f"example {row['example']}",
        "group": row["group"],
        "pieces": pieces,
        "most": [
            {"text": piece.text.strip() or piece.text, "weight": share(weight)}
            for piece, weight in most_attended(pieces)
        ],
        "attention": share(row["attention"]) if known_attention else None,
        "chance": share(row["chance"]) if known_attention else None,
        "right": row["right_answer"] if known else None,
        "answer": row["answer"],
        "correct": bool(row["correct"]) if known else None,
        "right_probability": share(row["right"]),
        "probability": share(row["probability"]),
        "cut": int(row["cut"]),
    }


def _left_out(described: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was left out, from which results, and why."""
    parts = {
        "task": "from the data",
        "relevance": "from the results on relevant tokens",
        "faithfulness": "from comprehensiveness and sufficiency",
    }
    return [
        {"part": part, "reasons": [f"{count} {reason}" for reason, count in described["left_out"][name].items()]}
        for name, part in parts.items()
        if described["left_out"][name]
    ]
