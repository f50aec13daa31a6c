"""Engines do the measurements of a sweep: this process, processes of this machine, or a cluster of Dask or Ray."""

import logging
import os
import re
import socket
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from itertools import islice
from typing import Any

from ...circuits.errors import CallError, QkovError, reason
from .process_state import interrupts_ignored_by_children, one_torch_thread, restored_process
from .sweep import Measurement, OpenedLast
from .worker_processes import WorkerLostError, done_by_workers

ENGINES = ("loky", "dask", "ray")
#: Seconds within which a cluster must answer.
PATIENCE = 10

#: The step of a measurement, and whether anything was measured, or the error that prevented it.
Outcome = tuple[int | None, bool | Exception]

# Typed as Any because joblib and Dask declare these arguments more narrowly than they accept them.
_ONE_BY_ONE: dict[str, Any] = {"batch_size": 1}
_LOCAL_CLUSTER: dict[str, Any] = {
    "threads_per_worker": 1,
    "silence_logs": logging.CRITICAL,
    # Dask's scheduler always serves HTTP, and warns where its usual port is taken, as by a cluster of the user's.
    "dashboard_address": "127.0.0.1:0",
    "scheduler_kwargs": {"dashboard": False},
}


class Engine(ABC):
    """Does measurements, in any order."""

    def run(self, measurements: Sequence[Measurement]) -> Generator[tuple[int | None, bool], None, None]:
        """Do the measurements, and yield the step of each and whether anything was measured.

        After an error no new measurement begins; those that have begun are finished before the error of the earliest
        step is raised. Closing the generator ends the workers at once.

        Args:
            measurements: The measurements to do.

        Raises:
            QkovError: A measurement failed, or the cluster cannot be reached.
            WorkerLostError: A worker ended without an answer.
        """
        errors: dict[int | None, Exception] = {}

        def until_an_error() -> Iterator[Measurement]:
            for measurement in measurements:
                if errors:
                    return
                yield measurement

        if not measurements:
            return
        with closing(self._checked_outcomes(until_an_error())) as outcomes:
            for step, outcome in outcomes:
                if isinstance(outcome, Exception):
                    errors[step] = outcome
                else:
                    yield step, outcome
        if errors:
            raise errors[min(errors, key=lambda step: -1 if step is None else step)]

    def _checked_outcomes(self, measurements: Iterator[Measurement]) -> Generator[Outcome, None, None]:
        try:
            yield from self._outcomes(measurements)
        except QkovError:
            raise
        except Exception as error:
            # An error of a measurement is returned as its outcome, so this one comes from the engine itself. Each
            # engine has its own exceptions for a worker that has ended.
            raise WorkerLostError(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        """Yield the outcomes as they arrive."""


class ThisProcess(Engine):
    """Does one measurement after another, in the order of the steps, with the threads that this process has."""

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        opened: OpenedLast | None = None
        for measurement in measurements:
            opened = opened or OpenedLast(measurement.options, measurement.kept_in)
            yield measurement.step, _outcome(measurement, opened)


class Processes(Engine):
    """Does measurements in processes of this machine, each with one thread."""

    def __init__(self, workers: int) -> None:
        """Set the number of processes."""
        self.workers = workers

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        with closing(done_by_workers(_in_one_thread, measurements, self.workers)) as outcomes:
            yield from outcomes


class Dask(Engine):
    """Does measurements on a Dask cluster: the one at an address, or one of processes of this machine."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        """Set the number of workers to start here, or the address of the cluster's scheduler."""
        self.workers, self.address = workers, address

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        # Imported first, so that only what Dask does as it works is undone, not what its import sets up.
        import distributed  # noqa: F401
        import joblib  # noqa: F401

        with restored_process("distributed"), self._client() as client:
            yield from _as_they_arrive(measurements, {"backend": "dask", "client": client})

    @contextmanager
    def _client(self) -> Iterator[Any]:
        from distributed import Client, LocalCluster

        # Dask logs a traceback when a scheduler goes away, which qkov reports in one line.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        if self.address is None:
            with interrupts_ignored_by_children():
                cluster = LocalCluster(n_workers=self.workers or 1, **_LOCAL_CLUSTER)
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
    """Does measurements on a Ray cluster: the one at an address, or one of processes of this machine."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        """Set the number of workers to use, and the address of the cluster."""
        self.workers, self.address = workers, address

    def _outcomes(self, measurements: Iterator[Measurement]) -> Iterator[Outcome]:
        import joblib

        with restored_process("ray"):
            # Ray reads these when it is imported: without them it asks its makers' server whether to report usage, and
            # logs failing connections.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
            import ray
            from ray.util.joblib import register_ray

            with self._cluster(ray):
                register_ray()
                workers = self.workers or (-1 if self.address else 1)
                with joblib.parallel_config(backend="ray", n_jobs=workers), joblib.Parallel(**_ONE_BY_ONE) as parallel:
                    # This backend returns nothing before all results of a call are there.
                    batch_size = 4 * parallel.n_jobs if parallel.n_jobs > 0 else 64
                    while batch := list(islice(measurements, batch_size)):
                        outcomes: Any = parallel(joblib.delayed(_in_one_thread)(measurement) for measurement in batch)
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
    """Return the engine with a name.

    Args:
        name: loky, dask or ray.
        workers: The number of workers; by default one, or all that the cluster at the address has.
        address: The address of a Dask or Ray cluster; by default one is started on this machine.

    Raises:
        CallError: There is no such engine, its package is not installed, or it does not accept the number of workers
            or the address.
        QkovError: Nothing answers at the address.
    """
    if name not in ENGINES:
        raise CallError(f"the engine should be one of {', '.join(ENGINES)}, got {name!r}")
    if workers is not None and workers < 1:
        raise CallError(f"workers should be at least 1, got {workers}")
    if name == "loky":
        if address is not None:
            raise CallError(f"loky runs on this machine only; give the engine, dask or ray, of {address}")
        return ThisProcess() if workers in (None, 1) else Processes(workers)
    module = {"dask": "distributed", "ray": "ray"}[name]
    if find_spec(module) is None:
        raise CallError(f"the engine {name} needs the package {module}: pip install 'qkov[{name}]'")
    if address is not None:
        _demand_answer(address)
    return Dask(workers, address) if name == "dask" else Ray(workers, address)


def _outcome(measurement: Measurement, opened: OpenedLast | None = None) -> bool | Exception:
    """Return whether anything was measured, or the error as a value, which every engine passes on unchanged."""
    try:
        return measurement.run(opened)
    except Exception as error:
        return error


def _in_one_thread(measurement: Measurement) -> Outcome:
    """Do a measurement in a worker."""
    with one_torch_thread():
        return measurement.step, _outcome(measurement)


def _as_they_arrive(measurements: Iterable[Measurement], config: dict[str, Any]) -> Iterator[Outcome]:
    import joblib

    with joblib.parallel_config(**config):
        parallel = joblib.Parallel(return_as="generator_unordered", **_ONE_BY_ONE)
        with interrupts_ignored_by_children():
            outcomes: Any = parallel(joblib.delayed(_in_one_thread)(measurement) for measurement in measurements)
        try:
            # `yield from` would close the outcomes itself, with joblib's warning.
            for outcome in outcomes:  # noqa: UP028
                yield outcome
        finally:
            with warnings.catch_warnings():
                # joblib warns of the measurements that are given up.
                warnings.simplefilter("ignore")
                outcomes.close()


def _demand_answer(address: str) -> None:
    """Refuse an address at which nothing listens; the clusters' own clients would try for minutes."""
    host_and_port = re.fullmatch(r"(?:\w+://)?\[?([^\[\]/]+?)\]?:(\d+)/?", address)
    if host_and_port is None:
        return
    try:
        socket.create_connection((host_and_port[1], int(host_and_port[2])), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _unreachable("cluster", address, error) from error


def _unreachable(kind: str, address: str, error: Exception) -> QkovError:
    return QkovError(
        f"the {kind} at {address} cannot be reached ({reason(error)}); is it running, and is the address right?"
    )
