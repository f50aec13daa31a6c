"""`python -m tests.fuzz --seconds N`: read damaged and hostile inputs of every kind, and report what goes wrong.

Each input is read in a process of its own, with a limit of 2 s of CPU time and of memory. It passes if it is read, or
refused in one line that names it. Whatever else happens is a finding: it is printed, and its files are kept in a
folder, from which `--again FOLDER` reads it once more. Run it from the project's root; the exit status is 1 if there is
a finding.
"""

import argparse
import sys
from pathlib import Path

from .campaign import again, campaign


def main() -> int:
    """Run a campaign, or one kept input, and print what became of it."""
    parser = argparse.ArgumentParser(description="Read damaged and hostile inputs, and report what goes wrong.")
    parser.add_argument("--seconds", type=float, help="When to stop. Default: 60, without --inputs.")
    parser.add_argument("--inputs", type=int, help="How many inputs to read.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the inputs. Default: 0.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first input. Default: 0.")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="Folder for the files of findings.")
    parser.add_argument("--again", type=Path, help="Read only the input that was kept in this folder.")
    arguments = parser.parse_args()
    if arguments.again is not None:
        outcome = again(arguments.again)
        print(f"{outcome.kind}: {outcome.what}")
        return int(outcome.is_finding)
    seconds = 60.0 if arguments.seconds is None and arguments.inputs is None else arguments.seconds
    result = campaign(arguments.seed, arguments.inputs, seconds, arguments.first, arguments.keep)
    for number, kind, outcome in result.findings:
        print(f"{outcome.kind}: input {number} ({kind}) of seed {arguments.seed}: {outcome.what}")
    for (kind, outcome), count in sorted(result.outcomes.items()):
        print(f"{kind}: {count} {outcome}")
    print(
        f"{result.inputs} inputs, {len(result.findings)} findings; at most {result.cpu:.2f} s of CPU time and "
        f"{result.growth / 1e6:.0f} MB of growth for one input"
    )
    return int(bool(result.findings))


if __name__ == "__main__":
    sys.exit(main())
