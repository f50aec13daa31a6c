"""Circuits over training: every checkpoint of a run measured, into a run store that can be resumed."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...circuits.attention_weights import AttentionWeights
from ...circuits.checkpoints import Checkpoint, OpenCheckpoint, find_checkpoints, open_checkpoint
from ...circuits.errors import CallError, QkovError
from ...circuits.factored import Circuit
from ...circuits.mapping import Mapping
from ...circuits.scales import measure
from .motion import MOTION, effective_ratio, motion
from .store import RunStore


@dataclass(frozen=True)
class TaskDirections:
    """A direction for each circuit, the same for every layer and head, such as C_QK and C_OV of a task."""

    name: str
    circuits: dict[str, Circuit]

    def fingerprint(self) -> str:
        """Return a hash of the directions."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=16)
        for name, circuit in sorted(self.circuits.items()):
            digest.update(name.encode())
            digest.update(circuit.dense().double().contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Tracked:
    """What a call of `track` did."""

    store: RunStore
    measured: list[int]
    kept: list[int]


def track(
    run: Path | str,
    store: Path | str,
    *,
    mapping: Mapping | None = None,
    directions: TaskDirections | None = None,
    trust_pickle: bool = False,
    progress: Callable[[int, int, int, bool], None] | None = None,
) -> Tracked:
    """Measure W_QK and W_OV of every checkpoint of a run, in the order of steps, and write the store.

    Every row holds the figures of `measure` for one layer, head and circuit, the change since the checkpoint before
    (`motion`), and scale and cosine along a reference: the task's directions where given, else the run's last
    checkpoint as it was when the store was begun. A step that the store holds already, made from the same files in
    the same way by the same version, is kept, and so is one whose file the run no longer holds (run.json names it).
    Each step is written whole, so that a run that is stopped anywhere loses at most the step it was at.

    Args:
        run: a folder of checkpoints, or one checkpoint.
        store: the folder to write; it is made where it is missing.
        mapping: which tensors to read, where the files are not qkov's own.
        directions: the reference.
        trust_pickle: let the files run code as they load.
        progress: called after each step with how many are done, of how many, the step, and whether it was measured now.

    Raises:
        CallError: the run is not there, or the store is of another run or made with another mapping or reference.
        QkovError: a checkpoint cannot be read, or two of them have circuits of different shape.
    """
    checkpoints = find_checkpoints(run)
    target = RunStore(store)
    settings = {
        "mapping": None if mapping is None else _mapping_settings(mapping),
        "directions": None if directions is None else {"name": directions.name, "hash": directions.fingerprint()},
        "basis": "raw",
    }
    source = str(Path(run).resolve())
    reference_step = _pinned_reference(target, source, settings, checkpoints)
    gone = _no_longer_there(target, checkpoints)
    fingerprints = {checkpoint.step: checkpoint.fingerprint() for checkpoint in checkpoints}
    opened = _Opened(mapping, trust_pickle)
    # Opening the first checkpoint before run.json is written keeps a wrong mapping from leaving a store behind.
    opened(checkpoints[0])
    target.describe(
        {
            "source": source,
            "settings": settings,
            "reference_step": reference_step,
            "versions": versions(),
            "checkpoints": [
                {"step": checkpoint.step, "uri": checkpoint.address, "fingerprint": fingerprints[checkpoint.step]}
                for checkpoint in checkpoints
            ],
            "no_longer_there": gone,
        }
    )
    reference = next((checkpoint for checkpoint in checkpoints if checkpoint.step == reference_step), None)
    measured, kept = [], []
    for position, checkpoint in enumerate(checkpoints):
        previous = checkpoints[position - 1] if position else None
        key = json.dumps(
            {
                "checkpoint": fingerprints[checkpoint.step],
                "previous": None if previous is None else [previous.step, fingerprints[previous.step]],
                "reference": None if reference is None else [reference.step, fingerprints[reference.step]],
                "settings": settings,
                "qkov": version("qkov"),
            },
            sort_keys=True,
        )
        new = not target.is_done(checkpoint.step, key)
        if new:
            rows = _rows(source, checkpoint, previous, reference, directions, opened)
            target.write(checkpoint.step, key, rows)
        (measured if new else kept).append(checkpoint.step)
        if progress is not None:
            progress(position + 1, len(checkpoints), checkpoint.step, new)
    return Tracked(store=target, measured=measured, kept=kept)


def versions() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("qkov", "torch", "numpy")}}


class _Opened:
    """The checkpoints opened last: one that serves as itself, and then as the one before, is opened once."""

    def __init__(self, mapping: Mapping | None, trust_pickle: bool) -> None:
        self.mapping, self.trust_pickle = mapping, trust_pickle
        self.held: dict[int, OpenCheckpoint] = {}

    def __call__(self, checkpoint: Checkpoint, keep: tuple[int, ...] = ()) -> OpenCheckpoint:
        self.held = {step: held for step, held in self.held.items() if step in (*keep, checkpoint.step)}
        if checkpoint.step not in self.held:
            self.held[checkpoint.step] = open_checkpoint(checkpoint.address, self.mapping, self.trust_pickle)
        return self.held[checkpoint.step]


def _rows(
    source: str,
    checkpoint: Checkpoint,
    previous: Checkpoint | None,
    reference: Checkpoint | None,
    directions: TaskDirections | None,
    opened: _Opened,
) -> list[dict[str, Any]]:
    """All rows of a checkpoint, with the same columns whether or not there is a checkpoint before it."""
    keep = tuple(other.step for other in (checkpoint, previous, reference) if other is not None)
    current = opened(checkpoint, keep)
    scalars = {f"training_{name}": value for name, value in sorted(current.scalars.items())}
    about = {
        "source": source,
        "step": checkpoint.step,
        "basis": "raw",
        "score_scale": False,
        "previous_step": None if previous is None else previous.step,
        "reference": _reference_name(reference, directions),
        **scalars,
    }
    rows: list[dict[str, Any]] = []
    before = _layers(previous, opened, keep, checkpoint)
    along = _layers(reference, opened, keep, checkpoint)
    for weights, earlier, referred in zip(current.layers(), before, along, strict=False):
        figures: dict[str, dict[str, Any]] = {}
        circuits = weights.circuits()
        for name, circuit in circuits.items():
            direction = None
            if directions is not None:
                direction = directions.circuits[name]
            elif referred is not None and reference is not None:
                direction = _counterpart(circuit, checkpoint, referred, reference, name)
            values = measure(circuit, reference=direction, eigenvalues=name == "OV")
            if earlier is not None and previous is not None:
                old = _counterpart(circuit, checkpoint, earlier, previous, name)
                values |= motion(circuit, old, checkpoint.step - previous.step)
            figures[name] = dict.fromkeys(MOTION) | {figure: value.tolist() for figure, value in values.items()}
        speeds = {name: values["relative_speed"] for name, values in figures.items()}
        for name, circuit in circuits.items():
            finite = _finite(circuit)
            for head in range(circuit.shape[0]):
                of_head = {figure: value and value[head] for figure, value in figures[name].items()}
                identity = {
                    "layer": weights.layer,
                    "head": head,
                    "circuit": name,
                    "rotary_offset": 0 if weights.rotary and name == "QK" else None,
                    "rows": circuit.shape[-2],
                    "columns": circuit.shape[-1],
                    "rank_bound": circuit.rank_bound,
                    "factorized": circuit.right is not None,
                    "finite": finite[head],
                }
                rows.append(about | identity | of_head | {"effective_ratio": effective_ratio(speeds, head)})
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def _layers(
    checkpoint: Checkpoint | None, opened: _Opened, keep: tuple[int, ...], current: Checkpoint
) -> Iterator[AttentionWeights | None]:
    if checkpoint is None:
        while True:
            yield None
    layers = opened(checkpoint, keep)
    wanted = opened(current, keep).layer_numbers
    if layers.layer_numbers != wanted:
        raise QkovError(
            f"{checkpoint.address} has the layers {layers.layer_numbers} and {current.address} has {wanted}: "
            f"the checkpoints of one run should have the same"
        )
    yield from layers.layers()


def _counterpart(
    circuit: Circuit, checkpoint: Checkpoint, weights: AttentionWeights, other_checkpoint: Checkpoint, name: str
) -> Circuit:
    """The same circuit in another checkpoint of the run."""
    other = weights.circuits().get(name)
    if other is None or other.shape != circuit.shape:
        shape = "none" if other is None else f"one of shape {tuple(other.shape)}"
        raise QkovError(
            f"{checkpoint.name} has a W_{name} of shape {tuple(circuit.shape)} [head, rows, columns] and "
            f"{other_checkpoint.name} has {shape}: the checkpoints of one run should agree"
        )
    return other


def _reference_name(reference: Checkpoint | None, directions: TaskDirections | None) -> str | None:
    if directions is not None:
        return directions.name
    return None if reference is None else f"step {reference.step}"


def _finite(circuit: Circuit) -> list[bool]:
    factors = [factor for factor in (circuit.left, circuit.right) if factor is not None]
    # float8 knows no isfinite of its own.
    return (
        torch.stack([torch.isfinite(factor.double()).flatten(1).all(dim=1) for factor in factors]).all(dim=0).tolist()
    )


def _pinned_reference(
    store: RunStore, source: str, settings: dict[str, Any], checkpoints: list[Checkpoint]
) -> int | None:
    """The step that a store compares with is settled when it is begun: more checkpoints do not undo its rows."""
    last = None if settings["directions"] is not None else checkpoints[-1].step
    if not store.exists():
        return last
    described = store.description()
    for key, value in (("source", source), ("settings", settings)):
        if described.get(key) != value:
            raise CallError(
                f"{store.folder} was made with another {key} ({json.dumps(described.get(key))} instead of "
                f"{json.dumps(value)}); give another --out, or delete it"
            )
    pinned = described.get("reference_step")
    if pinned is not None and pinned not in {checkpoint.step for checkpoint in checkpoints}:
        raise CallError(
            f"{store.folder} compares with step {pinned}, which {source} no longer holds; "
            f"give another --out, or delete it"
        )
    return pinned


def _no_longer_there(store: RunStore, checkpoints: list[Checkpoint]) -> list[int]:
    """Steps that were measured and whose checkpoint is gone: a training run often keeps only its last ones."""
    return sorted(set(store.steps()) - {checkpoint.step for checkpoint in checkpoints})


def _mapping_settings(mapping: Mapping) -> dict[str, Any]:
    return {
        "tensors": mapping.tensors,
        "layouts": mapping.layouts,
        "heads": mapping.heads,
        "prefix": mapping.prefix,
        "rotary": mapping.rotary,
        "scalars": mapping.scalars,
    }
