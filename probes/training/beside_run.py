"""The run of a process that takes part in gathering, while the first process measures."""

from typing import Any

import pandas as pd

from ...circuits.errors import CallError
from .model import LiveModel


class BesideRun:
    """Stands in for `LiveRun` where another process measures; it measures and writes nothing.

    Attributes:
        model: The model as it is read.
        last_step: The step that was gathered last.
    """

    def __init__(self, model: LiveModel, start: int) -> None:
        """Keep the model.

        Args:
            model: The model as it is read.
            start: The number of steps that it has been trained already.
        """
        self.model, self.last_step = model, start

    def measure(self, step: int, *_: Any) -> None:
        """Take note of the step."""
        self.last_step = step

    def add_scalars(self, *_: Any) -> None:
        """Store nothing."""

    def note_failures(self, *_: Any) -> None:
        """Store nothing."""

    def table(self) -> pd.DataFrame:
        """Refuse.

        Raises:
            CallError: Always, since another process has the rows.
        """
        raise CallError("this process measures nothing, since another one is the first: ask the probe of rank 0")
