"""SQuAD (Rajpurkar et al. 2016, 2018): questions whose answers stand in a paragraph."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError
from ...circuits.storage.places import Place
from .collecting import Found, LeftOut, collected
from .example import Task, TextExample
from .records import data_place, field, files_in, hub_rows, read_json

#: As in the paper.
PROMPT = "Q: {question} C: {context} A:"
SQUAD_BINS = (0.0, 0.05, 0.1, 0.5, 1.0)


def squad(
    data: Path | str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    prompt: str = PROMPT,
) -> Task:
    """Return prompts with the answer as their continuation; relevant is each annotator's answer in the context.

    The continuation is the answer that most annotators gave, of several the first. With `next_token` at the encoding
    its first token is to be predicted among all, as in the paper. Left out and counted: questions that cannot be
    answered from their paragraph, answers that are not at the offset given, and questions with no other answer.

    Args:
        data: a JSON file of version 1.1 or 2, or a folder of such; or what `datasets` loads, such as a hub id.
        split: the folder's file that begins so, such as `dev`; as `datasets` names it where that reads it.
        limit: keep so many questions.
        seed: of the draw of those.
        prompt: with {question} and {context}, each once.

    Raises:
        CallError: there are no such files, or the prompt lacks a part.
        QkovError: a file cannot be read, or is not as said.
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
    return collected(task, (found for row in rows for found in _examples(row, prompt, data)), limit, seed)


def _questions(file: Place) -> Iterator[dict[str, Any]]:
    try:
        for article in read_json(file)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {**question, "context": paragraph["context"]}
    except (KeyError, TypeError) as error:
        raise QkovError(
            f"{file} is not in the format of SQuAD ({error!r}): expected data[].paragraphs[].{{context, qas[]}}"
        ) from error


def _examples(row: dict[str, Any], prompt: str, data: Path | str) -> Iterator[Found]:
    answers = field(row, "answers", data)
    # datasets gives columns, the file objects.
    if isinstance(answers, dict):
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(answers["text"], answers["answer_start"], strict=True)
        ]
    if row.get("is_impossible") or not answers:
        yield LeftOut("that cannot be answered")
        return
    context, question = str(field(row, "context", data)), str(field(row, "question", data))
    found = []
    for answer in answers:
        text, start = field(answer, "text", data), field(answer, "answer_start", data)
        if text and start >= 0 and context[start : start + len(text)] == text:
            found.append((text, start))
        else:
            yield LeftOut("answers that are not at their offset")
    if not found:
        yield LeftOut("without an answer at its offset")
        return
    before, after = (part.replace("{question}", question) for part in prompt.split("{context}"))
    most = Counter(text for text, _ in found).most_common(1)[0][0]
    yield TextExample(
        text=before + context + after,
        label=0,
        relevant=tuple(((len(before) + start, len(before) + start + len(text)),) for text, start in found),
        continuations=(f" {most}",),
        id=str(row.get("id", "")),
    )
