"""Progress of long work: a bar on a terminal, plain lines elsewhere, on standard error either way."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class WorkProgress:
    """A context in which `update` shows how far the work has come."""

    def __init__(self, work: str, quiet: bool = False) -> None:
        """Name the work; quiet shows nothing."""
        self.work = work
        self.quiet = quiet
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._last_line = 0.0

    def __enter__(self) -> "WorkProgress":
        """Start the bar where there is a terminal."""
        if not self.quiet and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.work, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` is done, and what it is at."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"{self.work}: {what}")
            return
        now = time.monotonic()
        if done >= total or now - self._last_line >= 2:
            self._last_line = now
            print(f"{self.work}: {done} of {total}, {what}", file=sys.stderr, flush=True)
