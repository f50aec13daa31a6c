"""The subject-verb agreement task from any of its sources: generated sentences, or files in three formats."""

from pathlib import Path
from typing import Any

from ....circuits.errors import CallError
from ..collecting import checked_options
from ..example import Task
from ..records import data_place
from .lines import agreement_lines
from .pairs import agreement_pairs
from .sentences import agreement_sentences
from .tables import agreement_table

_FORMATS = {
    (".tsv", ".tsv.gz"): agreement_table,
    (".text", ".gold"): agreement_lines,
    (".json", ".jsonl"): agreement_pairs,
}


def agreement(
    data: Path | str | None = None, split: str | None = None, limit: int | None = None, seed: int = 0, **options: Any
) -> Task:
    """Return generated sentences, or the sentences of files whose endings determine the format.

    Args:
        data: None to generate sentences; or a file or folder of `.tsv` (`agreement_table`), `.text` and `.gold`
            (`agreement_lines`) or `.json` (`agreement_pairs`) files.
        split: name of a file in the folder, without its ending; None for all.
        limit: maximum number of sentences, generated or sampled with `seed`; None for all, or for the default number.
        seed: seed of the draws.
        options: options of `agreement_sentences`, or of the format's function.

    Raises:
        CallError: the data are not files of exactly one of the formats, or an option is unknown.
        QkovError: a file cannot be read, or is not in the expected format.
    """
    if data is None:
        if split is not None:
            raise CallError(f"generated sentences have no split {split!r}; leave it out, or give data")
        return agreement_sentences(limit, seed, **checked_options("agreement", agreement_sentences, options))
    place = data_place(data)
    names = [] if place is None else [file.name for file in (place.entries() if place.is_folder() else [place])]
    fitting = [read for endings, read in _FORMATS.items() if any(name.endswith(endings) for name in names)]
    if len(fitting) != 1:
        known = ", ".join(ending for endings in _FORMATS for ending in endings)
        raise CallError(
            f"{data} is not a file or folder of subject-verb agreement data in exactly one format; expected files that "
            f"end in one of {known}"
        )
    return fitting[0](data, split, limit, seed, **checked_options("agreement", fitting[0], options))
