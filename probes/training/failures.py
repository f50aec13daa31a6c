"""What became of failures of a measurement: they are counted and told once, or raised."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...circuits.errors import CallError


class Failures:
    """Counts what failed while a model was measured, so that training goes on.

    Attributes:
        count: How many measurements failed.
        last: Why the last one failed, in words.
        noted: Called after each failure with the number of failures, and what failed and why.
    """

    def __init__(self, on_error: str) -> None:
        """State what to do about a failure.

        Args:
            on_error: "warn" warns once of each failure; "raise" raises it.

        Raises:
            CallError: It is neither.
        """
        if on_error not in ("warn", "raise"):
            raise CallError(f"on_error should be 'warn' or 'raise', got {on_error!r}")
        self.count, self.last = 0, ""
        self.noted: Callable[[int, str], None] = lambda _count, _last: None
        self._raises = on_error == "raise"
        self._told: set[str] = set()

    @contextmanager
    def told(self, content: str) -> Iterator[None]:
        """Count and tell a failure of the block, or raise it.

        Args:
            content: What the block does, as a clause.
        """
        try:
            yield
        except Exception as error:
            if self._raises:
                raise
            self.count += 1
            self.last = f"{type(error).__name__}: {error}"
            self.noted(self.count, f"{content} failed ({self.last})")
            if self.last not in self._told:
                self._told.add(self.last)
                warnings.warn(
                    f"{content} failed, and training goes on without it ({self.last}); the same failure is not told "
                    f"again, and on_error='raise' raises it",
                    stacklevel=4,
                )
