"""The command `qkov`: thin over the library, one clear line for whatever goes wrong."""

import errno
import sys

import typer
from typer.exceptions import TyperException

from ...circuits.errors import CallError, QkovError
from .explain import explain
from .inspect import families, inspect
from .report import report
from .theory import predict, reproduce
from .track import track

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="The query-key and output-value circuits of trained transformers, and how training made them.",
)


for command in (reproduce, predict, inspect, families, track, explain, report):
    app.command()(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its status: 0 done, 1 the work failed, 2 the call was wrong."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status; whatever goes wrong is one line on standard error."""
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
        more = "; make room and run the same command again" if error.errno == errno.ENOSPC else ""
        return _refuse(f"{error.strerror or error}{where}: nothing is half written{more}", 1)
    if status == _INTERRUPTED:
        return _refuse("interrupted; nothing is half written: run the same command again to finish", 1)
    return status if isinstance(status, int) else 0


# What typer returns for Ctrl-C.
_INTERRUPTED = 130


def _refuse(message: str, status: int) -> int:
    print("qkov: " + " ".join(message.split()), file=sys.stderr)
    return status
