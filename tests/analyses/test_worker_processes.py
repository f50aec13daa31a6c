"""Worker processes: every answer arrives, a lost worker is one error, and no worker outlives its parent."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from qkov.analyses.trajectories.worker_processes import WorkerLostError, done_by_workers
from qkov.circuits import QkovError

from ..waiting import next_lines, until_ended

#: More than the pipe to a worker holds.
LARGE = "#" * 2**22
EARLIER: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def earlier_children() -> Iterator[None]:
    """What other tests of this process have started is not looked at."""
    EARLIER.update(psutil.Process().children())
    yield
    EARLIER.clear()


def own_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in EARLIER]


def test_every_job_is_done_once_by_as_many_processes():
    with closing(done_by_workers(os.path.basename, map(str, range(20)), 3)) as answers:
        assert sorted(answers, key=int) == list(map(str, range(20)))
    assert own_children() == []


def test_a_worker_has_one_thread_and_ignores_interrupts():
    questions = ["torch.get_num_threads()", "int(os.environ['OMP_NUM_THREADS'])", "os.kill(os.getpid(), 2) or 5"]
    imported = "__import__('torch')", "__import__('os')"
    jobs = [question.replace("torch", imported[0]).replace("os.", f"{imported[1]}.") for question in questions]
    assert list(done_by_workers(eval, jobs, 1)) == [1, 1, 5]


def test_a_large_job_and_a_large_answer_arrive_whole():
    tensor = torch.randn(3, 1000, 500)
    assert torch.equal(next(done_by_workers(torch.neg, [tensor], 1)), -tensor)


def test_what_a_worker_prints_is_no_answer(capfd):
    assert list(done_by_workers(eval, ["print('aside') or 3"], 1)) == [3]
    assert capfd.readouterr() == ("", "aside\n")


def test_the_error_of_a_job_is_raised_here(capfd):
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        list(done_by_workers(eval, ["1 / 0"], 2))
    assert own_children() == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("type('Local', (Exception,), {})('five')", "Local: five"),
        # It can be written but not read, since it keeps only one of the arguments that it needs.
        (
            "__import__('urllib.error').error.HTTPError('address', 404, 'missing', None, None)",
            "HTTPError: HTTP Error 404",
        ),
    ],
)
def test_an_error_that_cannot_be_sent_is_put_into_words(raised, words):
    with pytest.raises(QkovError, match=f"^{words}"):
        list(done_by_workers(exec, [f"raise {raised}"], 1))


def test_a_job_that_cannot_be_sent_is_an_error_of_the_caller(capfd):
    with pytest.raises(Exception, match="pickle"):
        list(done_by_workers(eval, [lambda: 1], 1))  # type: ignore[list-item]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("when", ["it works", "a job is written to it", "it is idle"])
def test_a_killed_worker_is_one_error_and_prints_nothing(when, capfd):
    def jobs() -> Iterator[str]:
        if when == "it works":
            yield "__import__('os').kill(__import__('os').getpid(), 9)"
        yield "1"
        (worker,) = own_children()
        if when == "it is idle":
            worker.kill()
            until_ended([worker])
        else:
            # A stopped worker reads nothing, so the large job cannot be written before it is killed.
            worker.suspend()
            threading.Timer(0.1, worker.kill).start()
        yield LARGE

    with pytest.raises(WorkerLostError):
        list(done_by_workers(exec, jobs(), 1))
    assert own_children() == []
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_cannot_start_is_lost_without_a_word(monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(WorkerLostError, match="status 1"):
        list(done_by_workers(eval, ["1"], 1))
    assert capfd.readouterr() == ("", "")


def test_closing_ends_the_workers_in_the_middle():
    answers = done_by_workers(eval, ["1", "__import__('threading').Event().wait()"], 2)
    assert next(answers) == 1
    workers = own_children()
    answers.close()
    assert workers
    assert own_children() == []


PARENT = textwrap.dedent(
    """
    from qkov.analyses.trajectories.worker_processes import done_by_workers

    # The second job of each worker sleeps with the interpreter's lock, as a library may that computes for long.
    for answer in done_by_workers(eval, ["1", "1", *["__import__('ctypes').PyDLL(None).pause()"] * 2], 2):
        print(answer, flush=True)
    """
)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_parent_even_while_a_library_holds_the_interpreter(tmp_path: Path, ending):
    command = [sys.executable, "-c", PARENT]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as parent,
    ):
        next_lines(parent, 2)
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) == 2
        parent.send_signal(ending)
    until_ended(workers)
    assert (tmp_path / "errors").read_text() == ""
