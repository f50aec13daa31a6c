"""Reads one input in a forked process, with limits of time and memory, and notes what it did outside of its folder.

The audit hook sees what goes through Python: files that it opens, processes, sockets, and code that it compiles or
runs. What torch, pyarrow and safetensors open in C++ it does not see.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkov.circuits import CallError, QkovError

from .inputs import Input
from .pickles import CANARY
from .readers import READERS

#: Seconds of CPU time that an input may take.
CPU_SECONDS = 2
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


def outcome_of(item: Input, folder: Path) -> Outcome:
    """Write an input into an empty folder, read it in a forked process, and return what became of it."""
    sandbox = folder / "input"
    sandbox.mkdir()
    item.write(sandbox)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        try:
            _work(item, sandbox, sending)
        finally:
            os._exit(0)
    os.close(sending)
    answer, status, usage = _answer(receiving, child)
    os.close(receiving)
    canary = folder / CANARY
    if canary.exists():
        canary.unlink()
        return Outcome("code ran", "a file was written that only code of the input writes")
    if answer is None:
        cpu = usage.ru_utime + usage.ru_stime
        if cpu >= CPU_SECONDS * 0.95:
            return Outcome("over time", f"more than {CPU_SECONDS} s of CPU time", cpu)
        return Outcome("died", f"the process ended with status {status} and said nothing", cpu)
    outcome = Outcome(**answer)
    return _judged(outcome, item)


def _judged(outcome: Outcome, item: Input) -> Outcome:
    if outcome.is_finding:
        return outcome
    if outcome.events:
        return Outcome("outside", "; ".join(outcome.events[:5]), outcome.cpu, outcome.growth)
    if outcome.cpu > CPU_SECONDS:
        return Outcome("over time", f"{outcome.cpu:.2f} s of CPU time", outcome.cpu, outcome.growth)
    if outcome.growth > max(4 * item.size, GROWTH):
        return Outcome(
            "over memory", f"{outcome.growth / 1e6:.0f} MB for {item.size} bytes", outcome.cpu, outcome.growth
        )
    return outcome


def _answer(receiving: int, child: int) -> tuple[dict[str, Any] | None, int, resource.struct_rusage]:
    parts = []
    stop = time.monotonic() + PATIENCE
    import select

    while True:
        ready, _, _ = select.select([receiving], [], [], max(0.0, stop - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        part = os.read(receiving, 65536)
        if not part:
            break
        parts.append(part)
    _, status, usage = os.wait4(child, 0)
    return (json.loads(b"".join(parts)) if parts else None), status, usage


def _work(item: Input, sandbox: Path, sending: int) -> None:
    in_use = int(_status("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS + 1, CPU_SECONDS + 1))
    os.chdir(sandbox)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    events: list[str] = []
    before, of_files = _status("VmRSS"), _status("RssFile") + _status("RssShmem")
    begun = time.process_time()
    sys.addaudithook(_Hook(str(sandbox), events))
    outcome = _read(item, sandbox)
    outcome.cpu = time.process_time() - begun
    # Pages of libraries that this process touches for the first time are no growth of an idle process's memory.
    mapped = max(0, _status("RssFile") + _status("RssShmem") - of_files)
    outcome.growth = max(0, _status("VmHWM") - before - mapped)
    outcome.events = events
    content = json.dumps(vars(outcome)).encode()
    while content:
        content = content[os.write(sending, content) :]


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

    def __init__(self, sandbox: str, events: list[str]) -> None:
        self.sandbox, self.events = sandbox, events

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
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
