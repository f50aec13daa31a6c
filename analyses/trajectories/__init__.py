"""Circuits over training: a run's checkpoints are measured into a store that can be resumed and read by other tools.

    from qkov.analyses.trajectories import RunStore, circuit_table, track

    tracked = track("checkpoints/", "my-store")  # measures what the store does not yet hold
    table = RunStore("my-store").table()  # pandas: one row for each step, stack, layer, head and circuit
    circuit_table(model)  # the same columns for one model in memory or one open checkpoint

The names in groups:

    Measuring runs          track, Tracked, TaskDirections (a direction for each circuit to compare with)
    Checking runs           audit, Integrity, Finding
    Reading what is stored  RunStore
    One model               circuit_table
    Two models              compare_models, ModelComparison (the change of each head)
"""

from typing import TYPE_CHECKING

from ...circuits.public_names import lazy_face

if TYPE_CHECKING:
    from .comparison.models import ModelComparison, compare_models
    from .integrity.auditing import audit
    from .integrity.findings import Finding
    from .integrity.result import Integrity
    from .snapshot import circuit_table
    from .store import RunStore
    from .tracking import Tracked, track
    from .view import TaskDirections

__all__ = [
    "Finding",
    "Integrity",
    "ModelComparison",
    "RunStore",
    "TaskDirections",
    "Tracked",
    "audit",
    "circuit_table",
    "compare_models",
    "track",
]

__getattr__, __dir__ = lazy_face(__name__)
