"""The command `qkov watch`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...circuits.errors import CallError
from ..terminal.output import say
from ..terminal.requirements import demand_supported


def watch(
    store: Annotated[
        Path, typer.Argument(help="Run store that CircuitProbe or qkov track writes; it may not exist yet.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page on this machine. Default: a free one.")
    ] = 0,
) -> int:
    """Watch a run in training on a page that refreshes itself.

    Serves the page to this machine alone, at 127.0.0.1, until Ctrl-C: the last step, how long ago it was written and
    what failed, then the loss, then every head. The store is only read.
    """
    demand_supported("pandas", "pyarrow", "matplotlib", "jinja2")
    if store.exists() and not store.is_dir():
        raise CallError(f"{store} is a file: expected the folder of a run store")

    from ..watching.server import WatchServer

    server = WatchServer(store, port)
    say(f"watching {store} at {server.url} (Ctrl-C ends)")
    sys.stdout.flush()
    try:
        server.serve()
    except KeyboardInterrupt:
        say("stopped watching")
    return 0
