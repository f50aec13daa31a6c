"""SQuAD (Rajpurkar et al. 2016, 2018): questions whose answers are spans of a paragraph."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, named_input
from ...circuits.storage.places import Place
from .collecting import LeftOut, SourceItem, collected
from .example import Task, TextExample
from .records import data_place, field, files_in, hub_rows, of_data, read_json

#: The prompt of "Faster Query-Key Learning Sharpens Attention".
PROMPT = "Q: {question} C: {context} A:"
#: Edges of the DTAP table for SQuAD in that paper.
SQUAD_BINS = (0.0, 0.05, 0.1, 0.5, 1.0)


@of_data("SQuAD")
def squad(
    data: Path | str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    prompt: str = PROMPT,
) -> Task:
    """Return prompts with the answer as their continuation; the relevant tokens are each annotator's answer.

    The continuation is the answer that most annotators gave, or the first such answer if there are several. If the
    examples are encoded with `next_token`, its first token is to be predicted among the whole vocabulary, as in "Faster
    Query-Key Learning Sharpens Attention". Questions that cannot be answered from their paragraph, answers that are not
    at their offset, and questions without any other answer are left out and counted.

    Args:
        data: a JSON file of version 1.1 or 2, or a folder of such files; or data that `datasets` loads, such as a hub
            id.
        split: the beginning of a file name in the folder, such as `dev`; or the split's name in `datasets`. None for
            all.
        limit: maximum number of questions, sampled with `seed`; None for all.
        seed: seed of the sample.
        prompt: the prompt, with {question} and {context} once each.

    Raises:
        CallError: there are no such files, or the prompt lacks a part.
        QkovError: a file cannot be read, or is not in the expected format.

    Source: Rajpurkar et al. 2016 (version 1.1) and 2018 (version 2).
    """
    if any(prompt.count(part) != 1 for part in ("{question}", "{context}")):
        raise CallError(f"prompt must have {{question}} and {{context}} once each; got {prompt!r}")
    task = Task(
        name="squad",
        examples=(),
        relevant="the answer in the context",
        attention_bins=SQUAD_BINS,
        probability_bins=SQUAD_BINS,
    )
    place = data_place(data)
    if place is None or (place.is_folder() and not any(file.suffix == ".json" for file in place.entries())):
        rows = hub_rows(data, split)
    else:
        rows = (row for file in files_in(place, (".json",), split) for row in _questions(file))
    return collected(task, (item for row in rows for item in _examples(row, prompt, data)), limit, seed)


def _questions(file: Place) -> Iterator[dict[str, Any]]:
    with named_input(file, "SQuAD", "expected data[].paragraphs[].{context, qas[]}"):
        for article in read_json(file)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {**question, "context": paragraph["context"]}


def _examples(row: dict[str, Any], prompt: str, data: Path | str) -> Iterator[SourceItem]:
    answers = field(row, "answers", data)
    # The file contains one object per answer; datasets gives columns.
    if isinstance(answers, dict):
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(answers["text"], answers["answer_start"], strict=True)
        ]
    if row.get("is_impossible") or not answers:
        yield LeftOut("that cannot be answered")
        return
    context, question = str(field(row, "context", data)), str(field(row, "question", data))
    located = []
    for answer in answers:
        text, start = field(answer, "text", data), field(answer, "answer_start", data)
        if text and start >= 0 and context[start : start + len(text)] == text:
            located.append((text, start))
        else:
            yield LeftOut("answers that are not at their offset")
    if not located:
        yield LeftOut("without an answer at its offset")
        return
    before, after = (part.replace("{question}", question) for part in prompt.split("{context}"))
    most = Counter(text for text, _ in located).most_common(1)[0][0]
    yield TextExample(
        text=before + context + after,
        label=0,
        relevant=tuple(((len(before) + start, len(before) + start + len(text)),) for text, start in located),
        continuations=(f" {most}",),
        id=str(row.get("id", "")),
    )
