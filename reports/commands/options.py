"""Options that several commands have."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ...circuits.errors import CallError

if TYPE_CHECKING:
    from ...circuits.reading.options import ReadingOptions

Value = TypeVar("Value", bound=str)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
MappingFile = Annotated[
    Path | None,
    typer.Option(
        "--map", help="TOML file that names the attention tensors, their layouts and the number of heads (a mapping)."
    ),
]
Family = Annotated[
    str | None,
    typer.Option(help="Read the checkpoint as this model family instead of recognising it; see qkov families."),
]
Heads = Annotated[
    int | None,
    typer.Option(min=1, help="Number of query heads, if it cannot be inferred from the config or the tensor shapes."),
]
Prefix = Annotated[
    str | None,
    typer.Option(help="Prefix of the tensor names to read, if the same tensors are stored under several prefixes."),
]
Revisions = Annotated[
    str | None,
    typer.Option(help="For a hub id: pattern of the revisions to read as checkpoints, such as 'step*'."),
]
Step = Annotated[
    list[str] | None,
    typer.Option(
        "--step",
        help="Where the step is in unusual names: 'A_1_1_{step}.pt'. * stands for any text; {layer} and {head} for "
        "numbers, where one step is spread over several files; 'init.pt=0' states the step of one name. Repeatable.",
    ),
]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle", help="Allow a PyTorch file to run the code that it contains. Only use it on files you trust."
    ),
]


def reading_options(
    mapping: Path | None, family: str | None, heads: int | None, prefix: str | None, trust_pickle: bool
) -> "ReadingOptions":
    """Return the options that say how to read a checkpoint, as one object.

    Args:
        mapping: The file that --map names.
        family: The value of --family.
        heads: The value of --heads.
        prefix: The value of --prefix.
        trust_pickle: Whether --trust-pickle is set.

    Raises:
        CallError: The mapping file cannot be read.
    """
    from ...circuits.architectures.mapping import read_mapping
    from ...circuits.reading.options import ReadingOptions

    stated = None if mapping is None else read_mapping(mapping)
    return ReadingOptions(stated, family, heads, prefix, trust_pickle)


def one_of(option: str, typed: str, known: tuple[Value, ...]) -> Value:
    """Return the value of an option if it is one of the known values.

    Args:
        option: The option's name, without dashes.
        typed: The value that was typed.
        known: The values that the option can have.

    Raises:
        CallError: The value is not known.
    """
    for value in known:
        if value == typed:
            return value
    raise CallError(f"--{option} should be one of {', '.join(known)}; got {typed!r}")
