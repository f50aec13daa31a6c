"""Options that several commands have, and what they print for programs."""

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for a program to read.")]
Map = Annotated[
    Path | None, typer.Option("--map", help="TOML file that names the attention tensors, their layout and the heads.")
]
Family = Annotated[
    str | None, typer.Option(help="Read as this family of models, in place of what would be recognised.")
]
Heads = Annotated[int | None, typer.Option(min=1, help="Query heads, where neither config nor shapes tell them.")]
Prefix = Annotated[str | None, typer.Option(help="Of the tensor names, where they are there under several.")]
Revisions = Annotated[
    str | None, typer.Option(help="For a hub id: the revisions to take as checkpoints, such as 'step*'.")
]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Let a PyTorch file run the code it names. Only for files you know.")
]


def print_json(result: Any) -> None:
    """Print a result as JSON, which knows neither NaN nor infinity: null stands for a figure that is not defined."""
    print(json.dumps(_without_nan(result), indent=1, allow_nan=False))


def command_as_typed() -> str:
    """Return the command that is running, so that it can be pasted into a shell."""
    return shlex.join(["qkov", *sys.argv[1:]])


def _without_nan(result: Any) -> Any:
    if isinstance(result, float) and not math.isfinite(result):
        return None
    if isinstance(result, dict):
        return {key: _without_nan(value) for key, value in result.items()}
    if isinstance(result, list):
        return [_without_nan(value) for value in result]
    return result
