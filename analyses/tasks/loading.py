"""The tasks by name."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError
from .agreement.agreement import agreement
from .collecting import checked_options
from .eraser import eraser
from .example import Task
from .hatexplain import hatexplain
from .induction import induction
from .lines import lines
from .squad import squad
from .synthetic import fifty_token, population

#: The function that makes each task. Functions with a parameter `data` read data; the others generate examples.
TASKS: dict[str, Callable[..., Task]] = {
    "fifty-token": fifty_token,
    "population": population,
    "induction": induction,
    "agreement": agreement,
    "hatexplain": hatexplain,
    "eraser": eraser,
    "squad": squad,
    "lines": lines,
}


def load_task(
    name: str,
    data: Path | str | None = None,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Task:
    """Load the examples of a task.

    Args:
        name: name of the task in TASKS. fifty-token, population and induction generate examples; agreement, the
            subject-verb agreement task, generates them unless data are given; hatexplain,
            eraser, squad and lines need data.
        data: a local path or an fsspec address; for hatexplain, squad and lines also the id of a data set on the hub.
        split: name of the split of the data; None for all.
        limit: maximum number of examples, generated or sampled with `seed`; None for all, or for the task's default.
        seed: seed of the draws.
        options: further options of the task; see its function.

    Returns:
        The task with its examples: token ids for the generated synthetic tasks, texts for the others.

    Raises:
        CallError: the name or an option is unknown, data are missing, or the task takes no data.
        QkovError: the data cannot be read.
    """
    if name not in TASKS:
        raise CallError(f"there is no task {name!r}; the known tasks are {', '.join(TASKS)}")
    source = TASKS[name]
    parameters = inspect.signature(source).parameters
    if "data" not in parameters:
        if data is not None or split is not None:
            raise CallError(f"task {name} generates its examples and takes neither data nor a split")
        return source(limit, seed, **checked_options(name, source, options))
    if data is None and parameters["data"].default is inspect.Parameter.empty:
        raise CallError(f"task {name} needs data; give a path, an address or the id of a data set")
    if name != "agreement":
        checked_options(name, source, options)
    return source(data, split, limit, seed, **options)
