"""What does the measurements: this process, processes of this machine, or a cluster of Dask or Ray."""

import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch

from ...circuits.errors import CallError, QkovError, reason
from .sweep import Measurement, OpenedLast

ENGINES = ("loky", "dask", "ray")
#: Seconds that a cluster may take to answer.
PATIENCE = 10

Outcome = tuple[int, bool | Exception]

# Not written out where they are used: both are declared more narrowly than they work.
_ONE_BY_ONE: dict[str, Any] = {"batch_size": 1}
_ONE_THREAD: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.CRITICAL}


class WorkerLostError(Exception):
    """A worker ended without an answer: it was killed, or its machine went away."""


class Engine(ABC):
    """Something that does measurements, in any order."""

    def run(self, measurements: Sequence[Measurement]) -> Generator[tuple[int, bool], None, None]:
        """Do them, and yield of each the step, and whether anything was measured.

        After an error nothing new is begun; what was begun is finished before the error of the first step is raised.
        Workers end at once where this is closed before.

        Raises:
            QkovError: a measurement could not be done, or the cluster cannot be reached.
            WorkerLostError: a worker ended without an answer.
        """
        errors: dict[int, Exception] = {}

        def until_an_error() -> Iterator[Measurement]:
            for measurement in measurements:
                if errors:
                    return
                yield measurement

        if not measurements:
            return
        with closing(self._told(until_an_error())) as told:
            for step, outcome in told:
                if isinstance(outcome, Exception):
                    errors[step] = outcome
                else:
                    yield step, outcome
        if errors:
            raise errors[min(errors)]

    def _told(self, measurements: Iterator[Measurement]) -> Generator[Outcome, None, None]:
        try:
            yield from self._outcomes(measurements)
        except QkovError:
            raise
        except Exception as error:
            # What goes wrong in a measurement comes back as its outcome: this is the engine itself, and each has its
            # own names for a worker that is no more.
            raise WorkerLostError(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        """Yield the outcomes as they come."""


class ThisProcess(Engine):
    """One measurement after the other, in the order of the steps, with the threads that this process has."""

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        opened: OpenedLast | None = None
        for measurement in measurements:
            opened = opened or OpenedLast(measurement.options, measurement.kept_in)
            yield measurement.step, _outcome(measurement, opened)


class Processes(Engine):
    """Processes of this machine, of one thread each."""

    def __init__(self, workers: int) -> None:
        """Say how many."""
        self.workers = workers

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        config = {"backend": "loky", "n_jobs": self.workers, "inner_max_num_threads": 1}
        yield from _as_they_come(measurements, config, parent=os.getpid())


class Dask(Engine):
    """A cluster of Dask: the one at an address, or one of processes of this machine."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        """Say how many workers to start here, or where the cluster's scheduler is."""
        self.workers, self.address = workers, address

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        with self._client() as client:
            yield from _as_they_come(measurements, {"backend": "dask", "client": client})

    @contextmanager
    def _client(self) -> Iterator[Any]:
        from distributed import Client, LocalCluster

        # It logs a traceback for a scheduler that went away, which is told in one line here.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        if self.address is None:
            with _interrupts_kept_from_children():
                cluster = LocalCluster(n_workers=self.workers or 1, **_ONE_THREAD)
            with cluster, Client(cluster, set_as_default=False) as client:
                yield client
            return
        try:
            client = Client(self.address, timeout=PATIENCE, set_as_default=False)
        except (OSError, ValueError) as error:
            raise _unreachable("Dask scheduler", self.address, error) from error
        with client:
            yield client


class Ray(Engine):
    """A cluster of Ray: the one at an address, or one of processes of this machine."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        """Say how many workers to use, and where the cluster is."""
        self.workers, self.address = workers, address

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        # Read as Ray is imported: it would ask its makers' server whether to report, and log connections as they fail.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        import joblib
        import ray
        from ray.util.joblib import register_ray

        with self._cluster(ray):
            register_ray()
            workers = self.workers or (-1 if self.address else 1)
            with joblib.parallel_config(backend="ray", n_jobs=workers), joblib.Parallel(**_ONE_BY_ONE) as parallel:
                # This backend gives no result before all of a call are there.
                while some := list(islice(measurements, 4 * parallel.n_jobs if parallel.n_jobs > 0 else 64)):
                    outcomes: Any = parallel(joblib.delayed(_in_one_thread)(measurement) for measurement in some)
                    yield from outcomes

    @contextmanager
    def _cluster(self, ray: Any) -> Iterator[None]:
        if ray.is_initialized():
            yield
            return
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        if self.address is None:
            ray.init(num_cpus=self.workers or 1, **quiet)
        else:
            try:
                ray.init(address=self.address, **quiet)
            except (OSError, RuntimeError, ValueError) as error:
                raise _unreachable("Ray cluster", self.address, error) from error
        try:
            yield
        finally:
            ray.shutdown()


def engine_named(name: str, workers: int | None = None, address: str | None = None) -> Engine:
    """Return an engine by its name.

    Raises:
        CallError: there is no such engine, its package is not installed, or the number of workers or the address are
            not for it.
        QkovError: nothing answers at the address.
    """
    if name not in ENGINES:
        raise CallError(f"the engine should be one of {', '.join(ENGINES)}, got {name!r}")
    if workers is not None and workers < 1:
        raise CallError(f"workers should be at least 1, got {workers}")
    if name == "loky":
        if address is not None:
            raise CallError(f"loky works on this machine alone; give the engine, dask or ray, of {address}")
        return ThisProcess() if workers in (None, 1) else Processes(workers)
    module = {"dask": "distributed", "ray": "ray"}[name]
    if find_spec(module) is None:
        raise CallError(f"the engine {name} needs the package {module}: pip install 'qkov[{name}]'")
    if address is not None:
        _demand_answer(address)
    return Dask(workers, address) if name == "dask" else Ray(workers, address)


def _outcome(measurement: Measurement, opened: OpenedLast | None = None) -> bool | Exception:
    """Whether anything was measured, or why it could not be: as a value, so that it crosses any engine as it is."""
    try:
        return measurement.run(opened)
    except Exception as error:
        return error


def _in_one_thread(measurement: Measurement, parent: int | None = None) -> Outcome:
    """Do a measurement in a worker.

    Args:
        measurement: to be done.
        parent: of a process that is to end with its parent, of which nothing else would tell it for minutes.
    """
    torch.set_num_threads(1)
    if parent is not None:
        _end_with(parent)
    return measurement.step, _outcome(measurement)


@cache
def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _as_they_come(
    measurements: Iterable[Measurement], config: dict[str, Any], parent: int | None = None
) -> Iterator[Outcome]:
    import joblib

    with joblib.parallel_config(**config):
        parallel = joblib.Parallel(return_as="generator_unordered", **_ONE_BY_ONE)
        with _interrupts_kept_from_children():
            outcomes: Any = parallel(
                joblib.delayed(_in_one_thread)(measurement, parent) for measurement in measurements
            )
        try:
            # Not `yield from`, which would close it where nothing silences it.
            for outcome in outcomes:  # noqa: UP028
                yield outcome
        finally:
            with warnings.catch_warnings():
                # joblib warns of the work that is given up.
                warnings.simplefilter("ignore")
                outcomes.close()


@contextmanager
def _interrupts_kept_from_children() -> Iterator[None]:
    """Children that are started meanwhile ignore Ctrl-C, which a terminal sends to all: this process ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _demand_answer(address: str) -> None:
    """Refuse an address where nothing listens, which the clients of clusters try for minutes."""
    found = re.fullmatch(r"(?:\w+://)?\[?([^\[\]/]+?)\]?:(\d+)/?", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _unreachable("cluster", address, error) from error


def _unreachable(what: str, address: str, error: Exception) -> QkovError:
    return QkovError(
        f"the {what} at {address} cannot be reached ({reason(error)}); is it running, and is the address right?"
    )
