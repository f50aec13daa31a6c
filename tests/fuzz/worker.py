"""Reads inputs in forked processes, with limits of time and memory, and notes what each did outside of its
folder.

The audit hook sees what goes through Python: files that it opens, processes, sockets, and code that it compiles or
runs. What torch, pyarrow and safetensors open in C++ it does not see.
"""

import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

from qkov.circuits import CallError, QkovError

from .inputs import Input
from .pickles import CANARY
from .readers import READERS

#: Seconds of CPU time that an input may take.
CPU_SECONDS = 2
#: Inputs that one process reads; forking takes longer than reading one.
BATCH = 50
#: Seconds after which an input that uses no CPU time counts as hanging, on a machine with much else to do.
PATIENCE = 60
#: Bytes by which memory may grow whatever the size of the input.
GROWTH = 50_000_000
#: Bytes of address space beyond those in use, so that a fault in the limits does not harm the machine.
_ADDRESS_SPACE = 6 * 2**30
_ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = tuple(
    {
        *(str(_ROOT), sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)),
        *(os.path.realpath(path) for path in sys.path if path),
        *("/usr/lib", "/usr/local/lib", "/usr/share", "/dev/null", "/dev/urandom", "/proc/", "/sys/", "/etc/localtime"),
    }
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
_OUTSIDE = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "urllib.Request", "webbrowser.open")
_PROCESSES = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
#: The classes that pickles of tensors name; nothing else may be looked up.
_PLAIN_CLASSES = ("torch", "collections", "_codecs", "numpy")


@dataclass
class Outcome:
    """What became of an input.

    Attributes:
        kind: "read", "refused", or the kind of the finding.
        what: The message of the refusal, or the evidence of the finding.
        cpu: Seconds of CPU time.
        growth: Bytes by which memory grew at most.
    """

    kind: str
    what: str = ""
    cpu: float = 0.0
    growth: int = 0
    events: list[str] = field(default_factory=list)

    @property
    def is_finding(self) -> bool:
        """Whether the input was neither read nor refused in one line, or broke a limit."""
        return self.kind not in ("read", "refused")


def outcomes(items: Iterable[tuple[int, Callable[[], Input]]], folder: Path) -> Iterator[tuple[int, Outcome]]:
    """Read inputs in forked processes, and yield the number and the outcome of each.

    A process reads up to `BATCH` inputs, each with limits of its own; one that a limit ended is followed by another.

    Args:
        items: The number of each input, and a function that makes it.
        folder: The folder in which each input gets an empty folder of its own.
    """
    rest = list(items)
    while rest:
        batch, answered = rest[:BATCH], 0
        for outcome in _batch(batch, folder):
            yield batch[answered][0], outcome
            answered += 1
        rest = rest[answered:]


def _batch(batch: list[tuple[int, Callable[[], Input]]], folder: Path) -> Iterator[Outcome]:
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        try:
            _work(batch, folder, sending)
        finally:
            os._exit(0)
    os.close(sending)
    answered, hanging = 0, False
    with os.fdopen(receiving, "rb", buffering=0) as pipe:
        for line in _lines(pipe):
            if line is None:
                hanging = True
                os.kill(child, signal.SIGKILL)
                break
            answered += 1
            yield Outcome(**json.loads(line))
    _, status = os.waitpid(child, 0)
    if answered == len(batch):
        return
    if hanging:
        yield Outcome("hangs", f"no answer within {PATIENCE} s")
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        yield Outcome("over time", f"more than {CPU_SECONDS + 1} s of CPU time", CPU_SECONDS + 1)
    else:
        yield Outcome("died", f"the process ended with status {status} and said nothing")


def _lines(pipe: FileIO) -> Iterator[bytes | None]:
    """Yield the lines of a pipe, and None if none comes for too long."""
    held = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], PATIENCE)
        if not ready:
            yield None
            return
        part = pipe.read(65536)
        if not part:
            return
        *lines, held = (held + part).split(b"\n")
        yield from lines


def _work(batch: list[tuple[int, Callable[[], Input]]], folder: Path, sending: int) -> None:
    in_use = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sandbox, hook = folder / "input", _Hook(str(folder / "input"))
    sys.addaudithook(hook)
    for _, make in batch:
        hook.is_on = False
        os.chdir(folder)
        item = make()
        shutil.rmtree(sandbox, ignore_errors=True)
        sandbox.mkdir()
        os.chdir(sandbox)
        item.write(sandbox)
        outcome = _measured(item, sandbox, hook)
        if (folder / CANARY).exists():
            (folder / CANARY).unlink()
            outcome = Outcome("code ran", "a file was written that only code of the input writes")
        os.write(sending, json.dumps(vars(_judged(outcome, item))).encode() + b"\n")


def _measured(item: Input, sandbox: Path, hook: "_Hook") -> Outcome:
    limit = int(time.process_time()) + CPU_SECONDS + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    # The peak of memory begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    before, of_files = _status("VmRSS"), _status("RssFile") + _status("RssShmem")
    hook.events, hook.is_on = [], True
    begun = time.process_time()
    outcome = _read(item, sandbox)
    outcome.cpu = time.process_time() - begun
    hook.is_on = False
    # Pages of libraries that this process touches for the first time are no growth of an idle process's memory.
    mapped = max(0, _status("RssFile") + _status("RssShmem") - of_files)
    outcome.growth = max(0, _status("VmHWM") - before - mapped)
    outcome.events = hook.events[:5]
    return outcome


def _judged(outcome: Outcome, item: Input) -> Outcome:
    limit, grown = max(4 * item.size, GROWTH), f"{outcome.growth / 1e6:.0f} MB for {item.size} bytes"
    broken = (
        ("outside", "; ".join(outcome.events), bool(outcome.events)),
        ("over time", f"{outcome.cpu:.2f} s of CPU time", outcome.cpu > CPU_SECONDS),
        ("over memory", grown, outcome.growth > limit),
    )
    for kind, evidence, is_broken in broken:
        if is_broken and not outcome.is_finding:
            return replace(outcome, kind=kind, what=evidence)
    return outcome


def _read(item: Input, sandbox: Path) -> Outcome:
    address = sandbox / item.address if item.address else sandbox
    try:
        READERS[item.reader](address, sandbox)
    except QkovError as error:
        return _refusal(error, item, sandbox)
    except BaseException:
        return Outcome("traceback", traceback.format_exc())
    return Outcome("read")


def _refusal(error: QkovError, item: Input, sandbox: Path) -> Outcome:
    message = str(error)
    names = (str(sandbox), *(Path(name).name for name in item.files))
    if len(message.splitlines()) != 1:
        return Outcome("not one line", message)
    if not any(name in message for name in names):
        return Outcome("names no input", f"{type(error).__name__}: {message}")
    if "MemoryError" in message or "allocate" in message:
        return Outcome("over memory", message)
    return Outcome("refused", f"{'call' if isinstance(error, CallError) else 'work'}: {message}")


def _status(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class _Hook:
    """Notes what an input makes this process do outside of its folder."""

    def __init__(self, sandbox: str) -> None:
        self.sandbox, self.events, self.is_on = sandbox, [], False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, (str, bytes)):
                writes = bool((flags or 0) & _WRITING) or any(letter in str(mode or "r") for letter in "wax+")
                self._note_path(event, os.fsdecode(path), writes)
        elif event in _CHANGES:
            for path in arguments[: 2 if event == "os.rename" else 1]:
                if isinstance(path, (str, bytes)):
                    self._note_path(event, os.fsdecode(path), writes=True)
        elif event in _OUTSIDE or event in _PROCESSES:
            self.events.append(f"{event} {arguments!r:.200}")
        elif event == "compile":
            source = arguments[0]
            if source is not None and CANARY in str(source):
                self.events.append(f"{event} {source!r:.200}")
        elif event == "exec":
            name = getattr(arguments[0], "co_filename", "<string>")
            if not name.startswith(("<", *_LIBRARIES)):
                self.events.append(f"{event} of {name}")
        elif event == "pickle.find_class":
            module = str(arguments[0])
            if module.partition(".")[0] not in _PLAIN_CLASSES:
                self.events.append(f"{event} {arguments!r:.200}")

    def _note_path(self, event: str, path: str, writes: bool) -> None:
        whole = os.path.normpath(os.path.join(self.sandbox, path))
        if not whole.startswith(self.sandbox) and (writes or not whole.startswith(_LIBRARIES)) and whole != os.devnull:
            self.events.append(f"{event} {path!r:.200}{' for writing' if writes else ''}")
