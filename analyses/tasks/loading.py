"""Tasks by their names."""

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

#: What makes each task; those that take `data` read it, the others make examples.
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
    """Return a task's examples.

    Args:
        name: fifty-token, population, induction; agreement (made here without data); or hatexplain, eraser, squad and
            lines, which need data.
        data: a path, an address of fsspec, or for hatexplain, squad and lines the id of a data set on the hub.
        split: of the data.
        limit: so many examples: those made, or those drawn of the data.
        seed: of what is drawn.
        options: of the task; see its function.

    Raises:
        CallError: the name or an option is unknown, or data are missing or not needed.
        QkovError: the data cannot be read.
    """
    if name not in TASKS:
        raise CallError(f"there is no task {name!r}; known are {', '.join(TASKS)}")
    source = TASKS[name]
    parameters = inspect.signature(source).parameters
    if "data" not in parameters:
        if data is not None or split is not None:
            raise CallError(f"task {name} makes its examples, and takes neither data nor split")
        return source(limit, seed, **checked_options(name, source, options))
    if data is None and parameters["data"].default is inspect.Parameter.empty:
        raise CallError(f"task {name} needs data: a path, an address or the id of a data set")
    if name != "agreement":
        checked_options(name, source, options)
    return source(data, split, limit, seed, **options)
