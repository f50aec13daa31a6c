"""Circuits over training: tracking and the run store."""

from .one_table import circuit_table
from .store import RunStore
from .tracking import Tracked, track
from .view import TaskDirections

__all__ = ["RunStore", "TaskDirections", "Tracked", "circuit_table", "track"]
