"""The command `qkov`: a thin layer over the library that answers every failure with one clear line."""

import errno
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from ...circuits.errors import CallError, QkovError
from ...circuits.visible_text import visible
from ..terminal.output import say
from .audit import audit
from .compare import compare
from .explain import explain
from .families import families
from .inspect import inspect
from .predict import predict
from .report import report
from .reproduce import reproduce
from .track import track
from .watch import watch

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for command in (reproduce, predict, inspect, families, audit, track, watch, compare, explain, report):
    app.command()(command)

_INTERRUPTED = 130


def _print_version(wanted: bool) -> bool:
    if wanted:
        from ...circuits.version import __version__

        say(f"qkov {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def qkov(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure the query-key and output-value circuits of transformers, and how training makes them."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status.

    The status is 0 if all is done, 1 if the work failed, 2 if the call was wrong and 130 if it was interrupted.

    Args:
        arguments: What follows `qkov` on the command line; by default the arguments of this process.
    """
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status; report any failure in one line on standard error.

    Args:
        arguments: What follows `qkov` on the command line; by default the arguments of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        app(["--help"], standalone_mode=False, prog_name="qkov")
        return 2
    try:
        status = app(arguments, standalone_mode=False, prog_name="qkov")
    except CallError as error:
        return _refuse(str(error), 2)
    except QkovError as error:
        return _refuse(str(error), 1)
    except TyperException as error:
        return _refuse(f"{error.format_message()} (qkov --help lists the commands)", error.exit_code)
    except OSError as error:
        where = f" ({error.filename2 or error.filename})" if error.filename else ""
        remedy = "; free some space and run the same command again" if error.errno == errno.ENOSPC else ""
        return _refuse(f"{error.strerror or error}{where}; no file was left half written{remedy}", 1)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    # Typer answers an interrupt with the same status.
    if status == _INTERRUPTED:
        return _refuse("interrupted; no file was left half written; run the same command again to finish", status)
    return status if isinstance(status, int) else 0


def _refuse(message: str, status: int) -> int:
    print("qkov: " + visible(" ".join(message.split())), file=sys.stderr)
    return status
