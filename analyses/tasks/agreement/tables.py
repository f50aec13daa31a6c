"""Subject-verb agreement in sentences of Wikipedia, from the table of Linzen, Dupoux & Goldberg (2016)."""

import csv
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOBase
from pathlib import Path

from ....circuits.errors import CallError, QkovError, named_input
from ....circuits.storage.places import Place
from ..collecting import LeftOut, SourceItem, collected
from ..example import Task
from ..records import data_place, files_in, of_data
from .sentences import Forms, agreement_example, agreement_task
from .verb_forms import plural_of, singular_of

_COLUMNS = ("orig_sentence", "subj", "verb", "verb_pos", "subj_index", "verb_index", "n_diff_intervening")
_LONGEST_LINE = 2**20
# Tags of the third person singular, of the plural, and of the infinitive, which has the form of the plural.
_SINGULAR, _PLURAL, _INFINITIVE = "VBZ", "VBP", "VB"


@of_data("a table of sentences with their subjects and verbs")
def agreement_table(
    data: Path | str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    verb_in_input: bool = False,
) -> Task:
    """Return the sentences up to their verb, with the verb's two forms as continuations.

    The table contains only the right form. The wrong form is derived by rules, and the plural of a singular also with
    the help of the verbs that the table itself tags. Sentences whose wrong form is not certain are left out and
    counted. The subject is relevant. The group is the number of attractors.

    Args:
        data: a TSV file with columns orig_sentence, subj, verb, verb_pos (VBZ or VBP), subj_index and verb_index
            (counted from 1), n_diff_intervening, and optionally pos_sentence, which may be compressed as `.tsv.gz`; or
            a folder of such files.
        split: name of a file in the folder, without its ending; None for all.
        limit: maximum number of examples, sampled with `seed`; None for all. The whole table is read, but no more
            examples than these are kept in memory.
        seed: seed of the sample.
        verb_in_input: whether the text ends with the right form of the verb, which is then relevant too. The label is
            then the verb's number, singular (0) or plural (1).

    Raises:
        CallError: there is no such file.
        QkovError: a file cannot be read, or lacks a column.

    Source: Linzen, Dupoux & Goldberg 2016.
    """
    place = data_place(data)
    if place is None:
        raise CallError(f"{data} does not exist; expected a TSV file")
    files = files_in(place, (".tsv", ".tsv.gz"), split)
    task = agreement_task(verb_in_input)
    return collected(task, _examples(files, verb_in_input), limit, seed)


def _examples(files: list[Place], verb_in_input: bool) -> Iterator[SourceItem]:
    for file in files:
        with file.local_copy() as path:
            verbs = frozenset(_verbs(path, file))
            for number, row in enumerate(_rows(path, file)):
                yield _example(row, f"{file.name}:{number}", verbs, verb_in_input)


def _verbs(path: Path, file: Place) -> Iterator[str]:
    """Yield the plural forms and infinitives in the table."""
    for row in _rows(path, file):
        if row["verb_pos"] == _PLURAL:
            yield row["verb"].lower()
        words, tags = row["orig_sentence"].split(" "), row.get("pos_sentence", "").split(" ")
        if len(words) == len(tags):
            yield from (word.lower() for word, tag in zip(words, tags, strict=True) if tag in (_PLURAL, _INFINITIVE))


def _example(row: dict[str, str], name: str, verbs: frozenset[str], verb_in_input: bool) -> SourceItem:
    words = row["orig_sentence"].split(" ")
    try:
        subject, verb = int(row["subj_index"]) - 1, int(row["verb_index"]) - 1
    except ValueError:
        return LeftOut("whose subject or verb is not where the table says")
    if (
        not 0 <= subject < verb < len(words)
        or words[subject].lower() != row["subj"].lower()
        or words[verb].lower() != row["verb"].lower()
    ):
        return LeftOut("whose subject or verb is not where the table says")
    right, tag = words[verb], row["verb_pos"]
    if tag not in (_SINGULAR, _PLURAL):
        return LeftOut("whose verb is neither singular nor plural")
    plural = tag == _PLURAL
    wrong = singular_of(right) if plural else plural_of(right, verbs)
    if wrong is None:
        return LeftOut("whose verb's other form is not certain")
    forms = Forms(wrong, right) if plural else Forms(right, wrong)
    return agreement_example(words[:verb], forms, plural, subject, verb_in_input, name, row["n_diff_intervening"])


def _rows(path: Path, file: Place) -> Iterator[dict[str, str]]:
    with _opened(path, file) as lines:
        # Quotation marks are words of the sentences.
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
        missing = [column for column in _COLUMNS if column not in (table.fieldnames or ())]
        if missing:
            raise QkovError(
                f"{file} has no column {', '.join(missing)}; its first line names {', '.join(table.fieldnames or ())}"
            )
        yield from table


def _bounded(lines: TextIOBase) -> Iterator[str]:
    """Yield the lines, none of which is long: a few compressed bytes may stand for a line of any length."""
    while line := lines.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"it has a line of more than {_LONGEST_LINE} characters")
        yield line


@contextmanager
def _opened(path: Path, file: Place) -> Iterator[Iterator[str]]:
    with named_input(file, "a table in UTF-8"):
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as lines:
            yield _bounded(lines)
