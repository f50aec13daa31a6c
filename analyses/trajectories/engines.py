"""Engines do the measurements of a sweep: this process, processes of this machine, or a cluster of Dask or Ray."""

import logging
import os
import queue
import re
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any

from ...circuits.errors import CallError, QkovError, reason
from .left_out import LeftOut
from .process_state import interrupts_ignored_by_children, one_torch_thread, restored_process
from .sweep import Measured, Measurement, OpenedLast
from .worker_checks import Expectation, demand_met_here, expected_of_workers
from .worker_processes import WorkerLostError, done_by_workers

ENGINES = ("processes", "dask", "ray")
#: What the first engine was called before it had processes of its own.
_EARLIER_NAMES = {"loky": "processes"}
#: Seconds within which a cluster must answer, and show a file that a worker wrote.
PATIENCE = 10
#: Seconds between two looks at something that sends no word.
_BETWEEN_LOOKS = 0.5

#: The step of a measurement, and what it did, which checkpoint is to be left out, or the error that prevented it.
Outcome = tuple[int | None, Measured | LeftOut | Exception]

# Typed as Any because Dask declares these arguments more narrowly than it accepts them.
_LOCAL_CLUSTER: dict[str, Any] = {
    "threads_per_worker": 1,
    "silence_logs": logging.CRITICAL,
    # Dask's scheduler always serves HTTP, and warns where its usual port is taken, as by a cluster of the user's.
    "dashboard_address": "127.0.0.1:0",
    "scheduler_kwargs": {"dashboard": False},
}


class Engine(ABC):
    """Does measurements, in any order.

    Attributes:
        patience: Seconds within which a file that a worker wrote must be seen by this process.
    """

    patience: int = 0

    def run(self, measurements: Sequence[Measurement]) -> Generator[tuple[int | None, Measured | LeftOut], None, None]:
        """Do the measurements, and yield the step of each and what it did, or which checkpoint is to be left out.

        After an error no new measurement begins; those that have begun are finished before the error of the earliest
        step is raised. Closing the generator ends the workers at once.

        Args:
            measurements: The measurements to do.

        Raises:
            QkovError: The cluster cannot be reached, a worker differs from this process, or the store cannot be written
                to.
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
        with closing(self._checked_outcomes(measurements, until_an_error())) as outcomes:
            for step, outcome in outcomes:
                if isinstance(outcome, Exception):
                    errors[step] = outcome
                else:
                    yield step, outcome
        if errors:
            raise errors[min(errors, key=lambda step: -1 if step is None else step)]

    def _checked_outcomes(
        self, measurements: Sequence[Measurement], pending: Iterator[Measurement]
    ) -> Generator[Outcome, None, None]:
        try:
            yield from self._outcomes(measurements, pending)
        except (QkovError, OSError):
            raise
        except Exception as error:
            # An error of a measurement is returned as its outcome, so this one comes from the engine itself. Each
            # engine has its own exceptions for a worker that has ended.
            if isinstance(error, WorkerLostError) or type(error).__module__.partition(".")[0] in ("distributed", "ray"):
                raise WorkerLostError(f"{type(error).__name__}: {error}") from error
            raise QkovError(
                f"the engine failed ({type(error).__name__}: {reason(error)}); what was measured remains in the store"
            ) from error

    @abstractmethod
    def _outcomes(self, measurements: Sequence[Measurement], pending: Iterator[Measurement]) -> Iterator[Outcome]:
        """Yield the outcomes as they arrive.

        Args:
            measurements: All measurements.
            pending: The same, taken when a worker is free for one; it ends early after an error.
        """


class ThisProcess(Engine):
    """Does one measurement after another, in the order of the steps, with the threads that this process has."""

    def _outcomes(self, measurements: Sequence[Measurement], pending: Iterator[Measurement]) -> Iterator[Outcome]:
        opened = OpenedLast(measurements[0].options, measurements[0].kept_in)
        for measurement in pending:
            yield measurement.step, _outcome(measurement, opened)


class Processes(Engine):
    """Does measurements in processes of this machine, each with one thread."""

    def __init__(self, workers: int) -> None:
        """Set the number of processes."""
        self.workers = workers

    def _outcomes(self, measurements: Sequence[Measurement], pending: Iterator[Measurement]) -> Iterator[Outcome]:
        with (
            expected_of_workers(measurements) as expectation,
            closing(done_by_workers(partial(_in_worker, expectation), pending, self.workers)) as outcomes,
        ):
            yield from outcomes


class Dask(Engine):
    """Does measurements on a Dask cluster: the one at an address, or one of processes of this machine."""

    patience = PATIENCE

    def __init__(self, workers: int | None, address: str | None) -> None:
        """Set the number of workers to start here, or the address of the cluster's scheduler."""
        self.workers, self.address = workers, address

    def _outcomes(self, measurements: Sequence[Measurement], pending: Iterator[Measurement]) -> Iterator[Outcome]:
        # Imported first, so that only what Dask does as it works is undone, not what its import sets up.
        import distributed  # noqa: F401

        with (
            restored_process("distributed"),
            self._client() as client,
            expected_of_workers(measurements) as expectation,
        ):
            self._ask(client, expectation)
            yield from self._as_they_arrive(client, partial(_in_worker, expectation), pending)

    def _ask(self, client: Any, expectation: Expectation) -> None:
        """Ask every worker whether it fits."""
        try:
            client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError as error:
            raise QkovError(
                f"the Dask cluster at {self.address} has no worker; start one with dask worker {self.address}"
            ) from error
        asked = [client.run(question, on_error="return") for question in expectation.questions()]
        for worker in asked[0]:
            expectation.demand_met(worker, [answers.get(worker) for answers in asked])

    def _as_they_arrive(self, client: Any, job: Any, pending: Iterator[Measurement]) -> Iterator[Outcome]:
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # As many as the workers' threads do, and as many again so that none waits for the next.
        at_once = 2 * max(1, sum(client.nthreads().values()))
        # Dask forgets a task whose future is not held.
        held: set[Any] = set()
        try:
            while True:
                for measurement in islice(pending, at_once - len(held)):
                    future = client.submit(job, measurement, key=f"qkov-{uuid.uuid4()}", pure=False)
                    held.add(future)
                    future.add_done_callback(ended.put)
                if not held:
                    return
                try:
                    future = ended.get(timeout=_BETWEEN_LOOKS)
                except queue.Empty:
                    if client.status not in ("running", "connecting"):
                        raise WorkerLostError("the scheduler is gone") from None
                    continue
                held.discard(future)
                yield future.result()
        finally:
            with suppress(Exception):
                client.cancel(list(held))

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

    patience = PATIENCE

    def __init__(self, workers: int | None, address: str | None) -> None:
        """Set the number of workers to use, and the address of the cluster."""
        self.workers, self.address = workers, address

    def _outcomes(self, measurements: Sequence[Measurement], pending: Iterator[Measurement]) -> Iterator[Outcome]:
        with restored_process("ray"):
            # Ray reads these when it is imported: without them it asks its makers' server whether to report usage, and
            # logs failing connections.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
            import ray

            with self._cluster(ray), expected_of_workers(measurements) as expectation:
                self._ask(ray, expectation)
                job = ray.remote(num_cpus=1)(_in_worker)
                at_once = self.workers or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
                running: list[Any] = []
                while True:
                    running += [
                        job.remote(expectation, next_one) for next_one in islice(pending, at_once - len(running))
                    ]
                    if not running:
                        return
                    (done, *_), running = ray.wait(running, num_returns=1)
                    yield ray.get(done)

    def _ask(self, ray: Any, expectation: Expectation) -> None:
        """Ask a worker on every machine whether it fits."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # A function without a name is sent whole, so that the worker need not have this version of qkov.
        call = ray.remote(num_cpus=0)(lambda question: question())
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                there = call.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
                asked[node["NodeManagerAddress"]] = [there.remote(question) for question in expectation.questions()]

        def answer(reference: Any) -> Any:
            try:
                return ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                return error.cause

        for worker, references in asked.items():
            expectation.demand_met(worker, [answer(reference) for reference in references])

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
        name: processes (of this machine), dask or ray.
        workers: The number of workers; by default one, or all that the cluster at the address has.
        address: The address of a Dask or Ray cluster; by default one is started on this machine.

    Raises:
        CallError: There is no such engine, its package is not installed, or it does not accept the number of workers
            or the address.
        QkovError: Nothing answers at the address.
    """
    name = _EARLIER_NAMES.get(name, name)
    if name not in ENGINES:
        raise CallError(f"the engine should be one of {', '.join(ENGINES)}, got {name!r}")
    if workers is not None and workers < 1:
        raise CallError(f"workers should be at least 1, got {workers}")
    if name == "processes":
        if address is not None:
            raise CallError(f"processes run on this machine only; give the engine, dask or ray, of {address}")
        return ThisProcess() if workers in (None, 1) else Processes(workers)
    module = {"dask": "distributed", "ray": "ray"}[name]
    if find_spec(module) is None:
        raise CallError(f"the engine {name} needs the package {module}: pip install 'qkov[{name}]'")
    if address is not None:
        _demand_answer(address)
    return Dask(workers, address) if name == "dask" else Ray(workers, address)


def demand_whole(measurement: Measurement, measured: Measured, patience: int) -> None:
    """Refuse to count a measurement whose files this process does not find whole in the store.

    Args:
        measurement: The measurement.
        measured: What the worker says that it did.
        patience: Seconds to wait for the files, which a network may show late.

    Raises:
        QkovError: A file is missing, holds another number of rows, or was made from something else.
    """
    seen = measurement.rows_in_store()
    deadline = time.monotonic() + patience
    while (seen != measured.rows or seen[0] is None) and time.monotonic() < deadline:
        time.sleep(_BETWEEN_LOOKS)
        # A file system in a network looks again for a file that was missing when its folder is listed.
        with suppress(OSError):
            os.listdir(measurement.store.steps_folder)
        seen = measurement.rows_in_store()
    if seen != measured.rows or seen[0] is None:
        raise QkovError(
            f"{measurement.store.path(measurement.step)} is not what a worker wrote: it has {seen[0]} rows here and "
            f"{measured.rows[0]} there; give --out a folder that all workers share, and nobody else writes to"
        )


def _outcome(measurement: Measurement, opened: OpenedLast | None = None) -> Measured | LeftOut | Exception:
    """Return what was measured, or the error as a value, which every engine passes on unchanged."""
    try:
        return measurement.run(opened)
    except Exception as error:
        return error


def _in_worker(expectation: Expectation, measurement: Measurement) -> Outcome:
    """Do a measurement in a worker."""
    try:
        demand_met_here(expectation)
    except QkovError as error:
        return measurement.step, error
    with one_torch_thread():
        return measurement.step, _outcome(measurement)


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
