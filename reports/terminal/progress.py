"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ...circuits.visible_text import visible

if TYPE_CHECKING:
    from rich.progress import Progress

#: Plain lines come at most this often, in seconds.
_BETWEEN_LINES = 2.0


class WorkProgress:
    """A context in which `update` shows how much of the work is done."""

    def __init__(self, work: str, quiet: bool = False) -> None:
        """Prepare the display.

        Args:
            work: The name of the work, shown in front of every update.
            quiet: Show nothing at all.
        """
        self.work = work
        self.quiet = quiet
        self._bar: Progress | None = None
        self._last_line = 0.0

    def __enter__(self) -> "WorkProgress":
        """Start the bar if standard error is a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not self.quiet and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.work, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar and leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """Show how much of the work is done.

        Args:
            done: How many parts are done.
            total: How many parts there are.
            what: What is being done now.
        """
        if self.quiet:
            return
        what = visible(what)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"{self.work}: {what}")
            return
        now = time.monotonic()
        if done >= total or now - self._last_line >= _BETWEEN_LINES:
            self._last_line = now
            print(f"{self.work}: {done} of {total}, {what}", file=sys.stderr, flush=True)
