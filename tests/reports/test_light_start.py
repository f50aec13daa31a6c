"""What starts quickly: help, version, completion and the list of families import no heavy library."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "transformer_lens", "matplotlib", "pandas", "numpy", "scipy", "datasets", "captum")
PROGRAM = f"""
import json, sys
from qkov.reports.commands.main import run
try:
    status = run(json.loads(sys.argv[1]))
except SystemExit as leaving:
    status = leaving.code or 0
print("status", status, "heavy", *[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def started(arguments: list[str], **environment: str) -> tuple[str, str]:
    """What a command prints, and its status and the heavy libraries that it imported."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return process.stdout, process.stderr.strip()


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["--help"], 0, "Measure the query-key and output-value circuits"),
        (["-h"], 0, "Commands:"),
        ([], 2, "Commands:"),
        (["--version"], 0, "qkov "),
        (["families"], 0, "| `gpt2` |"),
        (["families", "--json"], 0, '"model_types"'),
        (["track", "--help"], 0, "--rotary-offset"),
        (["explain", "-h"], 0, "--methods"),
        (["report", "-h"], 0, "--out"),
        (["watch", "-h"], 0, "--port"),
        (["--show-completion", "bash"], 0, "COMP_WORDS"),
    ],
)
def test_no_heavy_library_is_imported(arguments, status, printed):
    # The shell is named rather than detected, since a test may run without one.
    output, said = started(arguments, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert printed in output
    assert said == f"status {status} heavy"


@pytest.mark.parametrize(("typed", "offered"), [("qkov tr", "track"), ("qkov track --rot", "--rotary-offset")])
def test_a_shell_completes_commands_and_options(typed, offered):
    position = str(len(typed.split()) - 1)
    output, said = started([], _QKOV_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=position)
    assert output.split() == [offered]
    assert said == "status 0 heavy"
