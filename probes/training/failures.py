"""What became of failures of a measurement: they are counted and told once, or raised."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ...circuits.errors import CallError


class Failures:
    """Counts what failed while a model was measured, so that training goes on.

    Attributes:
        count: How many measurements failed.
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
        self.count = 0
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
            reason = f"{type(error).__name__}: {error}"
            if reason not in self._told:
                self._told.add(reason)
                warnings.warn(
                    f"{content} failed, and training goes on without it ({reason}); the same failure is not told "
                    f"again, and on_error='raise' raises it",
                    stacklevel=4,
                )
