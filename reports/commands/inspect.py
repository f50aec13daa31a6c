"""The command `qkov inspect`."""

from typing import Annotated

import typer

from .options import Family, Heads, Json, MappingFile, Prefix, Revisions, TrustPickle, reading_options
from .output import print_json
from .requirements import demand_supported


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A checkpoint, or a folder of checkpoints (the last is opened): path, URL or hub id."),
    ],
    mapping: MappingFile = None,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    revisions: Revisions = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint contains and how it is read.

    Prints the tensors that were recognised, their layouts, and the circuits that qkov track would measure. Nothing is
    written.
    """
    demand_supported("torch", "safetensors", "fsspec")

    from ...circuits.checkpoints.runs import find_run
    from ...circuits.public_addresses import public_address
    from ...circuits.reading.checkpoint import open_checkpoint
    from ...circuits.reading.inspection import inspect_checkpoint
    from .inspection_text import inspection_lines

    run = find_run(checkpoint, revisions)
    options = reading_options(mapping, family, heads, prefix, trust_pickle)
    facts = inspect_checkpoint(open_checkpoint(run.checkpoints[-1].files, options))
    steps = [each.step for each in run.checkpoints]
    if as_json:
        print_json({**facts, "steps": steps, "left_out": run.left_out})
        return
    print(
        f"{public_address(checkpoint)}: {len(steps)} checkpoint{'s' * (len(steps) > 1)}, step {steps[0]}"
        + f" to {steps[-1]}" * (len(steps) > 1)
    )
    for name, reason in run.left_out.items():
        print(f"left out {name}: {reason}")
    print(f"opened {facts['address']}: {facts['tensors']} tensors")
    for line in inspection_lines(facts):
        print(line)
