"""The commands that say what is recognised: `qkov inspect` and `qkov families`."""

from typing import Annotated

import typer

from .options import Family, Heads, Json, Map, Prefix, Revisions, TrustPickle, print_json


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, or a folder of them (the last one is opened): path, URL or hub id.")
    ],
    mapping: Map = None,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    revisions: Revisions = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """What was found in a file or folder, and what would be measured."""
    from ...circuits.architectures.mapping import read_mapping
    from ...circuits.checkpoints.runs import find_run
    from ...circuits.reading.inspection import inspect_checkpoint
    from ...circuits.reading.options import ReadingOptions
    from .inspection_text import inspection_lines

    found = find_run(checkpoint, revisions)
    named = None if mapping is None else read_mapping(mapping)
    options = ReadingOptions(named, family, heads, prefix, trust_pickle)
    facts = inspect_checkpoint(options.open(found.checkpoints[-1].files))
    facts["steps"] = [each.step for each in found.checkpoints]
    facts["left_out"] = found.left_out
    if as_json:
        print_json(facts)
        return
    steps = facts["steps"]
    print(
        f"{checkpoint}: {len(steps)} checkpoint{'s' * (len(steps) > 1)}, step {steps[0]}"
        + f" to {steps[-1]}" * (len(steps) > 1)
    )
    for name, reason in found.left_out.items():
        print(f"left out {name}: {reason}")
    print(f"opened {facts['address']}: {facts['tensors']} tensors")
    for line in inspection_lines(facts):
        print(line)


def families(as_json: Json = False) -> None:
    """The families of models that are recognised, and what is named and skipped."""
    from .inspection_text import families_facts, families_lines

    if as_json:
        print_json(families_facts())
        return
    for line in families_lines():
        print(line)
