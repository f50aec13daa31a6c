"""`python -m tests.mutation --seconds N`: put small faults into the modules that decide numbers.

For each fault, a copy of the package is changed in one place and the module's own tests run on it. A fault that the
tests notice is killed, one that they do not notice has survived, and one under which they take too long is undecided.
Run it from the project's root, by hand and nightly; the tests have to pass without a fault. The exit status is 1 where
less than 95 % of the decided faults in a package were killed.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .mutants import Mutant, mutants
from .project_copy import PACKAGES, ROOT, Copy, Order
from .targets import LEFT_OUT, TARGETS

ENOUGH = 0.95
NAMES = {"failed": "killed", "passed": "survived", "undecided": "undecided"}


def main() -> int:
    """Run mutants until the time is spent, and print what became of them."""
    parser = argparse.ArgumentParser(description="Put small faults into modules, and see whether the tests notice.")
    parser.add_argument("--seconds", type=float, default=600, help="When to stop. Default: 600.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the order of the faults. Default: 0.")
    parser.add_argument("--timeout", type=float, default=120, help="Seconds for the tests of a fault. Default: 120.")
    parser.add_argument("--only", default="", help="Only modules whose path contains this text.")
    arguments = parser.parse_args()
    stop = time.monotonic() + arguments.seconds
    results: dict[str, Counter[str]] = {package: Counter() for package in PACKAGES}
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        order = Order()
        passing: set[str] = set()
        for module, mutant in chosen(random.Random(arguments.seed), arguments.only):
            if time.monotonic() > stop:
                break
            tests = (*TARGETS[module], *(f"--deselect={test}" for test in LEFT_OUT))
            typed = False
            with copy.holding(module, mutant.source):
                outcome, failed = copy.outcome(tests, order, arguments.timeout, typed=typed)
                if outcome == "passed":
                    typed = True
                    outcome, failed = copy.outcome(tests, order, arguments.timeout, typed=typed)
            if outcome == "failed":
                # A test that also fails without the fault has not noticed it.
                wanted = failed or [*tests, "--collect-only"]
                if not passing.issuperset(wanted) and not copy.passes(wanted, arguments.timeout, typed=typed):
                    print(f"this fails without a fault, or takes too long: {' '.join(wanted)}", file=sys.stderr)
                    summary(results)
                    return 2
                passing.update(wanted)
            results[module.split("/")[0]][outcome] += 1
            if outcome != "failed":
                print(f"{NAMES[outcome]}: {module}:{mutant.line} {mutant.fault}", flush=True)
    return summary(results)


def chosen(order: random.Random, only: str) -> Iterator[tuple[str, Mutant]]:
    """Yield one mutant of each module in turn, in a random order, until all are used up."""
    waiting = {
        module: order.sample(found, len(found))
        for module in TARGETS
        if only in module and (found := list(mutants((ROOT / module).read_text())))
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
        decided = outcomes["failed"] + outcomes["passed"]
        if not decided:
            print(f"{package}: nothing decided")
            continue
        share = outcomes["failed"] / decided
        print(f"{package}: {outcomes['failed']} of {decided} killed ({share:.0%}), {outcomes['undecided']} undecided")
        status |= share < ENOUGH
    return status


if __name__ == "__main__":
    sys.exit(main())
