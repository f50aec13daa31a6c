"""Whether a worker elsewhere can take part in a sweep: its versions, and whether it sees the run and the store."""

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...circuits.errors import QkovError, reason
from ...circuits.storage.atomic_write import temporary_file
from ...circuits.storage.places import LocalPlace
from .sweep import Measurement

#: The packages on which measured values depend.
_PACKAGES = ("qkov", "torch", "numpy")


@dataclass(frozen=True)
class Expectation:
    """What a worker has to have in common with the process that counts on it.

    Attributes:
        versions: The packages on which measured values depend, with their versions.
        store: The folder of the store.
        probe: The path of a file in the store.
        content: What the file holds.
        sizes: Files of the run on this machine, with their sizes in bytes.
    """

    versions: tuple[tuple[str, str], ...]
    store: str
    probe: str
    content: str
    sizes: tuple[tuple[str, int], ...]

    def questions(self) -> list[Callable[[], Any]]:
        """Return what a worker is asked: calls of the standard library, which no version of qkov has to know."""
        return [
            os.getcwd,
            *(partial(version, package) for package, _ in self.versions),
            partial(Path.read_text, Path(self.probe)),
            *(partial(os.path.getsize, path) for path, _ in self.sizes),
        ]

    def demand_met(self, worker: str, answers: Sequence[Any]) -> None:
        """Refuse a worker that differs.

        Args:
            worker: The worker, as the message names it.
            answers: Its answers to `questions`, or the errors that they raised.

        Raises:
            QkovError: The worker has another version of a package, or does not see the run or the store.
        """
        folder, *rest = answers
        where = f"the worker {worker} (in the folder {folder})"
        for (package, expected), answer in zip(self.versions, rest, strict=False):
            if isinstance(answer, PackageNotFoundError) or not isinstance(answer, str):
                raise QkovError(f"{where} has no {package}; install {package} {expected} there")
            if _public(answer) != _public(expected):
                raise QkovError(
                    f"{where} has {package} {answer}, and this process has {expected}: values of different versions do "
                    f"not belong into one store; install the same version there"
                )
        content, *sizes = rest[len(self.versions) :]
        if content != self.content:
            raise QkovError(
                f"{where} does not see the store {self.store} ({_said(content)}); give --out a folder that all workers "
                f"share"
            )
        for (path, expected), size in zip(self.sizes, sizes, strict=True):
            if size != expected:
                raise QkovError(
                    f"{where} does not see the run: {path} ({_said(size)}); put the run where all workers see it"
                )


@contextmanager
def expected_of_workers(measurements: Sequence[Measurement]) -> Iterator[Expectation]:
    """Write a probe into the store of some measurements, and give what workers have to see.

    Args:
        measurements: At least one measurement.

    Yields:
        The expectation, which holds as long as the context lasts.

    Raises:
        CallError: The store cannot be written to.
    """
    store = measurements[0].store.folder
    content = secrets.token_hex(16)
    files = [measurement.checkpoint.files.weights for measurement in (measurements[0], measurements[-1])]
    local = {str(place.path.absolute()): place.size() or 0 for place in files if isinstance(place, LocalPlace)}
    packages = tuple((package, version(package)) for package in _PACKAGES)
    with temporary_file(store, "probe", content.encode()) as probe:
        yield Expectation(packages, str(store), str(probe), content, tuple(local.items()))


@cache
def demand_met_here(expectation: Expectation) -> None:
    """Refuse to work in this process if it is not what the expectation states; each process looks once.

    A worker that joins a cluster later is asked in this way.

    Args:
        expectation: What the sweep expects of its workers.

    Raises:
        QkovError: This process has another version of a package, or does not see the run or the store.
    """
    expectation.demand_met(socket.gethostname(), [_answer(question) for question in expectation.questions()])


def _answer(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:
        return error


def _public(stated: str) -> str:
    """Return a version without the part that names a build, as in 2.6.0+cpu."""
    return stated.partition("+")[0]


def _said(answer: Any) -> str:
    return reason(answer) if isinstance(answer, BaseException) else "it finds another file there"
