"""Circuits over training: tracking and the run store."""

from .circuit_table import circuit_table
from .measuring import TaskDirections
from .store import RunStore
from .track import Tracked, track

__all__ = ["RunStore", "TaskDirections", "Tracked", "circuit_table", "track"]
