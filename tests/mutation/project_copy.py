"""A copy of the project, in which one module at a time holds a fault, and what its tests say about it."""

import os
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("circuits", "analyses", "probes", "reports")

#: What tests import and no fault can reach: imported once, before processes are forked for the tests.
_KEPT_IMPORTED = (
    "torch",
    "transformers.modeling_utils",
    "transformer_lens.model_bridge",
    "scipy.stats",
    "scipy.integrate",
    "jaxtyping",
    "beartype",
)

#: The project's own options, without the one that checks types.
_UNTYPED = "--import-mode=importlib --strict-markers"


@dataclass
class Order:
    """What is known about the tests: those that killed a mutant run first, then the quick ones.

    Attributes:
        seconds: how long each test took the last time, with what had to be made for it.
        killers: the tests that noticed a fault.
        failed: the tests that failed in this run.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    killers: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests (pytest calls this)."""
        items.sort(key=lambda item: (item.nodeid not in self.killers, self.seconds[item.nodeid]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember how long a test took, and whether it failed (pytest calls this)."""
        if report.when == "setup":
            self.seconds[report.nodeid] = 0
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)


class Copy:
    """A copy of the packages and their tests."""

    def __init__(self, folder: Path) -> None:
        """Copy the project, and import what all tests need."""
        self.root = folder / "project"
        for name in (*PACKAGES, "tests"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, self.root)
        # A folder that comes before the installed qkov on the path.
        self.path = folder / "path"
        (self.path / "qkov").mkdir(parents=True)
        for package in PACKAGES:
            (self.path / "qkov" / package).symlink_to(self.root / package)
        for module in _KEPT_IMPORTED:
            import_module(module)

    @contextmanager
    def holding(self, module: str, content: str) -> Iterator[None]:
        """Give a module of the copy another content for a while."""
        path = self.root / module
        before = path.read_text()
        path.write_text(content)
        try:
            yield
        finally:
            path.write_text(before)

    def outcome(self, tests: Sequence[str], order: Order, timeout: float, *, typed: bool) -> tuple[str, list[str]]:
        """Run tests on the copy until one fails.

        Args:
            tests: What pytest takes to choose tests.
            order: What is known about these tests; it learns from this run.
            timeout: After how many seconds the tests are stopped.
            typed: Whether types and shapes are checked where functions are called, which takes longer than many tests.

        Returns:
            "failed", "passed", or "undecided" if they take too long, and the names of the tests that failed. No name is
            there if the tests could not even be collected, or their process ended.
        """
        context = get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=self._test, args=(tests, order, sender, typed))
        process.start()
        sender.close()
        try:
            if not receiver.poll(timeout):
                return "undecided", []
            status, seconds, failed = receiver.recv()
        except EOFError:
            return "failed", []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        order.seconds |= seconds
        order.killers |= set(failed)
        return "passed" if status == pytest.ExitCode.OK else "failed", failed

    def passes(self, tests: Sequence[str], timeout: float, *, typed: bool) -> bool:
        """Return whether tests pass on the copy as it is, in the time.

        The names of their parameters may be made of what the fault changed, so all parameters are tried in that case.
        """
        without_parameters = [*dict.fromkeys(test.partition("[")[0] for test in tests)]
        return any(
            self.outcome(names, Order(), timeout, typed=typed)[0] == "passed" for names in (tests, without_parameters)
        )

    def _test(self, tests: Sequence[str], order: Order, sender: Connection, typed: bool) -> None:
        """Run the tests in this process, which has imported nothing of the project but this package."""
        os.setpgrp()
        os.chdir(self.root)
        os.environ |= {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.path), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        # Plugins that were imported early are none that assert anything.
        options = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
        untyped = () if typed else ("-o", f"addopts={_UNTYPED}")
        status = pytest.main([*options, *untyped, *tests], plugins=[order])
        sender.send((int(status), order.seconds, order.failed))
