"""The command `qkov audit`."""

from typing import Annotated

import typer

from ..terminal.output import print_json, say
from ..terminal.progress import WorkProgress
from ..terminal.requirements import demand_supported
from .options import Family, Heads, Json, MappingFile, Prefix, Revisions, Step, TrustPickle, reading_options


def audit(
    run: Annotated[
        str, typer.Argument(help="A folder of checkpoints (path, URL or hub id), or a run store that qkov track wrote.")
    ],
    mapping: MappingFile = None,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    revisions: Revisions = None,
    step: Step = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> int:
    """Check whether a run's checkpoints are what they claim to be.

    Prints a line for each of these: checkpoints that are identical to the bit, layers that are identical in some
    checkpoints but not in all, checkpoints that are farther from their neighbours than these are from each other, and
    checkpoints that could not be checked. The attention tensors are read once and nothing is measured. The exit status
    is 1 if anything is found.
    """
    demand_supported("torch", "safetensors", "fsspec", "pandas", "pyarrow")

    from ...analyses.trajectories.integrity.auditing import audit as audit_run
    from ...analyses.trajectories.integrity.result import sentences, summary
    from ...circuits.checkpoints.steps.step import step_in_words

    options = reading_options(mapping, family, heads, prefix, trust_pickle)
    with WorkProgress("audit", quiet=as_json) as progress:
        audited = audit_run(
            run,
            revisions=revisions,
            step=step,
            options=options,
            progress=lambda done, total, step: progress.update(done, total, step_in_words(step)),
        )
    if as_json:
        print_json(audited.as_dict())
    else:
        for sentence in sentences(audited):
            say(sentence)
        for name, reason in audited.left_out.items():
            say(f"left out {name}: {reason}")
        if not audited.findings:
            say(summary(audited))
    return 0 if audited.is_sound else 1
