"""`python -m tests.mutation --seconds N`: put small faults into the modules that decide numbers.

For each fault, a copy of the package is changed in one place and the module's own tests run on it. A fault that the
tests notice is killed, one that they do not notice has survived, and one under which they take too long is undecided.
Run it from the project's root, by hand and nightly; the tests have to pass without a fault. The exit status is 1 where
less than 95 % of the decided faults in a package were killed.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .mutants import Mutant, mutants
from .targets import TARGETS

ROOT = Path(__file__).parents[2]
PACKAGES = ("circuits", "analyses", "probes", "reports")
ENOUGH = 0.95


def main() -> int:
    """Run mutants until the time is spent, and print what became of them."""
    parser = argparse.ArgumentParser(description="Put small faults into modules, and see whether the tests notice.")
    parser.add_argument("--seconds", type=float, default=600, help="When to stop. Default: 600.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the order of the faults. Default: 0.")
    parser.add_argument("--only", default="", help="Only modules whose path contains this text.")
    arguments = parser.parse_args()
    stop = time.monotonic() + arguments.seconds
    results: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        durations: dict[str, float] = {}
        for module, mutant in chosen(random.Random(arguments.seed), arguments.only):
            if time.monotonic() > stop:
                break
            tests = TARGETS[module]
            if module not in durations:
                begun = time.monotonic()
                if copy.outcome(tests, timeout=600) != "survived":
                    print(f"the tests of {module} fail without a fault: {' '.join(tests)}", file=sys.stderr)
                    return 2
                durations[module] = time.monotonic() - begun
            with copy.holding(module, mutant):
                outcome = copy.outcome(tests, timeout=3 * durations[module] + 30)
            results[module.split("/")[0]][outcome] += 1
            if outcome != "killed":
                print(f"{outcome}: {module}:{mutant.line} {mutant.fault}", flush=True)
    return summary(results)


def chosen(order: random.Random, only: str) -> Iterator[tuple[str, Mutant]]:
    """Yield one mutant of each module in turn, in a random order, until all are used up."""
    waiting = {
        module: order.sample(found, len(found))
        for module in TARGETS
        if only in module and (found := mutants((ROOT / module).read_text()))
    }
    while waiting:
        for module in order.sample(sorted(waiting), len(waiting)):
            yield module, waiting[module].pop()
            if not waiting[module]:
                del waiting[module]


def summary(results: dict[str, Counter[str]]) -> int:
    """Print a line for each package, and return the exit status."""
    status = 0
    for package, outcomes in results.items():
        decided = outcomes["killed"] + outcomes["survived"]
        if not decided:
            print(f"{package}: nothing decided")
            continue
        share = outcomes["killed"] / decided
        print(f"{package}: {outcomes['killed']} of {decided} killed ({share:.0%}), {outcomes['undecided']} undecided")
        status |= share < ENOUGH
    return status


class Copy:
    """A copy of the packages and their tests, in which one module at a time holds a fault."""

    def __init__(self, folder: Path) -> None:
        """Copy the project."""
        self.root = folder / "project"
        for name in (*PACKAGES, "tests"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, self.root)
        # A folder that comes before the installed qkov on the path.
        namespace = folder / "path" / "qkov"
        namespace.mkdir(parents=True)
        for package in PACKAGES:
            (namespace / package).symlink_to(self.root / package)
        self.environment = os.environ | {"PYTHONPATH": str(namespace.parent), "PYTHONDONTWRITEBYTECODE": "1"}

    def holding(self, module: str, mutant: Mutant) -> "Held":
        """Return a context in which a module of the copy is a mutant."""
        return Held(self.root / module, mutant.source)

    def outcome(self, tests: tuple[str, ...], timeout: float) -> str:
        """Run tests on the copy: killed if one fails, survived if all pass, undecided if they take too long."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=self.environment, timeout=timeout, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired:
            return "undecided"
        return "survived" if done.returncode == 0 else "killed"


class Held:
    """A file whose content is another one for a while."""

    def __init__(self, path: Path, content: str) -> None:
        """Remember both."""
        self.path, self.content, self.before = path, content, path.read_text()

    def __enter__(self) -> None:
        """Write the other content."""
        self.path.write_text(self.content)

    def __exit__(self, *_: object) -> None:
        """Put the content back."""
        self.path.write_text(self.before)


if __name__ == "__main__":
    sys.exit(main())
