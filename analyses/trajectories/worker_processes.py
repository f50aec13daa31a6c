"""Worker processes of this machine: each does one job after another in one thread, and ends when its parent does."""

import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any, TypeVar

from ...circuits.errors import QkovError, reason

Job = TypeVar("Job")
Result = TypeVar("Result")

#: What a worker runs first: it imports from where its parent does, whatever its working folder holds. Its parent says
#: what became of it, so it says nothing itself.
_START = (
    "import pickle, sys; sys.excepthook = lambda *_: None; sys.path[:] = pickle.load(sys.stdin.buffer); "
    f"from {__name__} import serve; serve(sys.stdin.buffer)"
)
#: The variables that tell the numerical libraries how many threads to use.
_ONE_THREAD = dict.fromkeys(
    (
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
        *("VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS"),
    ),
    "1",
)
#: The option of Linux's prctl that chooses the signal sent to a process when its parent ends.
_SIGNAL_AT_PARENTS_DEATH = 1
#: The bytes in front of each message that state its length.
_LENGTH = 8


class WorkerLostError(Exception):
    """A worker ended without an answer: it was killed, or its machine went away."""


def done_by_workers(
    function: Callable[[Job], Result], jobs: Iterable[Job], workers: int
) -> Generator[Result, None, None]:
    """Yield what a function returns for each job, as the answers arrive.

    A job is taken when a worker is free, and nothing but the answers is ever printed or raised about a worker. When
    this process ends, however it ends, its workers end at once; an interrupt from the keyboard reaches this process
    only. Closing the generator ends the workers in the middle of what they do.

    Args:
        function: A function of a module, called with each job in a worker.
        jobs: The jobs, taken lazily.
        workers: The number of processes.

    Raises:
        WorkerLostError: A worker ended without an answer.
        Exception: What the function raised for a job.
    """
    team = _Team(function, iter(jobs), workers)
    try:
        yield from team.answers()
    finally:
        team.end()


def serve(received: IO[bytes]) -> None:
    """Do the jobs that the parent sends, in a worker.

    Args:
        received: The stream of the jobs, which ends when the parent does.
    """
    if sys.platform == "linux":
        # The kernel ends this process even while a library holds the interpreter.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
    # Answers have the standard output to themselves; what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        while (message := _receive(received)) is not None:
            messages.put(message)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        _send(answers, _answer(messages.get()))


class _Team:
    """The workers of one call, each with a thread of this process that starts it and hands it jobs.

    The kernel ends a worker with the thread that started it, so this thread stays as long as its worker does.
    """

    def __init__(self, function: Callable[[Any], Any], jobs: Iterator[Any], workers: int) -> None:
        self._function, self._jobs = function, jobs
        self._taking, self._starting = threading.Lock(), threading.Lock()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None] | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = False
        self._threads = [threading.Thread(target=self._employ, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def answers(self) -> Iterator[Any]:
        working = len(self._threads)
        while working:
            answer = self._answers.get()
            if answer is None:
                working -= 1
                continue
            result, error = answer
            if error is not None:
                raise error
            yield result

    def end(self) -> None:
        with self._starting:
            self._ended = True
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()

    def _employ(self) -> None:
        """Start a worker and hand it jobs until none is left."""
        try:
            process = self._start()
            if process is not None:
                try:
                    self._hand_jobs(process)
                finally:
                    for stream in (process.stdin, process.stdout):
                        # Closing writes what a worker that is gone will not read.
                        with suppress(OSError):
                            if stream is not None:
                                stream.close()
                    process.wait()
        except Exception as error:
            self._answers.put((None, error))
        self._answers.put(None)

    def _start(self) -> subprocess.Popen[bytes] | None:
        if sys.platform != "win32":
            # Inherited by the worker, which shares a terminal with this process.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with self._starting:
            if self._ended:
                return None
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | _ONE_THREAD,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
            self._processes.append(process)
            return process

    def _hand_jobs(self, process: subprocess.Popen[bytes]) -> None:
        sent, received = process.stdin, process.stdout
        assert sent is not None
        assert received is not None
        greeting = pickle.dumps(sys.path)
        while (job := self._next_job()) is not None:
            message = pickle.dumps((self._function, job[0]))
            try:
                sent.write(greeting)
                _send(sent, message)
                answer = _receive(received)
            except OSError as error:
                raise WorkerLostError(reason(error)) from error
            if answer is None:
                raise WorkerLostError(f"it ended with status {process.wait()}")
            greeting = b""
            self._answers.put(pickle.loads(answer))

    def _next_job(self) -> tuple[Any] | None:
        with self._taking:
            for job in self._jobs:
                return (job,)
        return None


def _answer(message: bytes) -> bytes:
    """Return the result of a job and None, or None and the error that it raised, as bytes."""
    try:
        function, job = pickle.loads(message)
        return pickle.dumps((function(job), None))
    except Exception as error:
        try:
            answer = pickle.dumps((None, error))
            # Some exceptions can be written but not read.
            pickle.loads(answer)
        except Exception:
            return pickle.dumps((None, QkovError(f"{type(error).__name__}: {reason(error)}")))
        return answer


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(_LENGTH))
    stream.write(message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes | None:
    """Return the next message, or None if the stream ends before the message does."""
    length = int.from_bytes(stream.read(_LENGTH))
    message = stream.read(length)
    return message if length and len(message) == length else None
