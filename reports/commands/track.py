"""The command `qkov track`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Family, Heads, Json, Map, Prefix, Revisions, TrustPickle, command_as_typed, print_json


def track(
    run: Annotated[str, typer.Argument(help="A folder of checkpoints, or one: path, URL or hub id.")],
    mapping: Map = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the store and the report; qkov-NAME if not given.")
    ] = None,
    basis: Annotated[
        str, typer.Option(help="raw, folded (norms folded into the weights) or folded_centred (what is written, too).")
    ] = "raw",
    rotary_offset: Annotated[
        int, typer.Option(help="Of W_QK of rotary models: position of the query less that of the key.")
    ] = 0,
    composition: Annotated[
        bool, typer.Option("--composition", help="Measure the composition scores of all pairs of heads as well.")
    ] = False,
    engine: Annotated[str, typer.Option(help="loky (processes of this machine), dask or ray.")] = "loky",
    workers: Annotated[
        int | None, typer.Option(help="Of one thread each; one if not given, or all that a cluster has.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Of the cluster: tcp://HOST:PORT for dask, HOST:PORT or auto for ray.")
    ] = None,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    revisions: Revisions = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Circuits over a run's checkpoints: a store that can be resumed, and its report."""
    from ...analyses.trajectories.tracking import track as track_run
    from ...circuits.architectures.mapping import read_mapping
    from ..pages.run_report import write_run_report
    from .progress import WorkProgress

    named = None if mapping is None else read_mapping(mapping)
    out = _default_folder(run) if out is None else out
    with WorkProgress("track", quiet=as_json) as progress:
        tracked = track_run(
            run,
            out,
            basis=basis,
            rotary_offset=rotary_offset,
            composition=composition,
            engine=engine,
            workers=workers,
            address=address,
            revisions=revisions,
            mapping=named,
            family=family,
            heads=heads,
            prefix=prefix,
            trust_pickle=trust_pickle,
            progress=lambda done, total, step, new: progress.update(
                done, total, f"step {step} {'measured' if new else 'was there'}"
            ),
        )
    report = write_run_report([tracked.store], out / "report.html", command=command_as_typed())
    if as_json:
        print_json({"store": str(out), "report": str(report), "measured": tracked.measured, "kept": tracked.kept})
        return
    new = len(tracked.measured)
    print(f"measured {new} checkpoint{'s' * (new != 1)}, kept {len(tracked.kept)} that were there")
    for name, reason in tracked.store.description()["left_out"].items():
        print(f"left out {name}: {reason}")
    print(f"store: {out}")
    print(f"report: {report}")


def _default_folder(run: str) -> Path:
    from ...circuits.checkpoints.folders import SUFFIXES
    from ...circuits.storage.address import place_of

    place = place_of(run)
    return Path(f"qkov-{place.name.removesuffix(place.suffix) if place.suffix in SUFFIXES else place.name}")
