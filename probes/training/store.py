"""The run store of a model in training: written step by step, and readable at any moment."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ...analyses.trajectories.store import RunStore, table_of
from ...circuits.errors import CallError, QkovError
from ...circuits.storage.atomic_write import write_atomically
from ...circuits.weights.attention_weights import BIASES, NAMES
from ...circuits.weights.source import LayersInMemory

_NAME = "reference.safetensors"


def keep_reference(folder: Path, layers: LayersInMemory) -> None:
    """Write the weights and biases of layers into a store, whole or not at all."""
    tensors = {
        f"{weights.stack}/{weights.layer}/{name}": tensor.contiguous()
        for weights in layers.layers()
        for name in (*NAMES, *BIASES)
        if (tensor := getattr(weights, name)) is not None
    }
    write_atomically(folder / _NAME, save(tensors))


def kept_reference(folder: Path, layers: LayersInMemory) -> LayersInMemory:
    """Return the layers with the weights and biases that the store keeps.

    Raises:
        QkovError: the store has no such weights, or they are of another model.
    """
    try:
        tensors = load_file(folder / _NAME)
    except (OSError, SafetensorError) as error:
        raise QkovError(
            f"{folder / _NAME}, with which the run is compared, is missing or damaged: give another folder"
        ) from error
    held = []
    for weights in layers.layers():
        now = {name: tensor for name in (*NAMES, *BIASES) if (tensor := getattr(weights, name)) is not None}
        kept = {name: tensors.get(f"{weights.stack}/{weights.layer}/{name}") for name in now}
        for name, tensor in kept.items():
            if tensor is None or tensor.shape != now[name].shape:
                found = "none" if tensor is None else f"one of shape {list(tensor.shape)}"
                raise QkovError(
                    f"the model has a {name} of shape {list(now[name].shape)} in {weights.label}, and the store "
                    f"{folder} was begun with {found}: give another folder"
                )
        held.append(replace(weights, **kept))
    return LayersInMemory(tuple(held))


class LiveStore:
    """A run store that grows with training, each step written whole.

    Attributes:
        dropped: the steps that were deleted as training went on from an earlier one.
    """

    def __init__(self, folder: Path | str, description: dict[str, Any], start: int, resume: bool) -> None:
        """Name the store; nothing is written yet.

        Args:
            folder: of the store.
            description: what run.json says; its source and settings are what a store to go on with has to agree in.
            start: the first step, whose weights are there now.
            resume: go on with a store, whose steps after `start` are deleted.

        Raises:
            CallError: the store is there and is not to be gone on with, or is of another run.
        """
        self._store = RunStore(folder)
        self._description, self._start = json.loads(json.dumps(description)), start
        self.dropped: list[int] = []
        self._columns: list[str] = []
        self._is_new = not self._store.exists()
        if not self._is_new:
            found = self._store.description()
            self._demand_same(found, resume)
            self._description["reference_step"] = found["reference_step"]

    def reference(self, layers: LayersInMemory) -> tuple[int, LayersInMemory]:
        """Return what the rows are compared with, and its step: the layers given, or those that a store began with.

        Raises:
            QkovError: the store has lost them, or they are of another model.
        """
        step = self._description["reference_step"]
        return (step, layers) if self._is_new else (step, kept_reference(self._store.folder, layers))

    def begin(self, reference: LayersInMemory | None) -> bool:
        """Write run.json and delete what lies after the start; say whether the start itself is still to be written.

        Args:
            reference: the layers that rows are compared with, kept in a new store; None where they are not.

        Raises:
            QkovError: the disk is full, or cannot be written to.
        """
        with self._demand_written("what a store begins with"):
            if self._is_new and reference is not None:
                keep_reference(self._store.folder, reference)
            self._store.describe(self._description)
            self.dropped = self._store.drop_after(self._start)
            self._columns = self._store.columns()
            # A writer that was killed as it added columns began with the first file.
            self._store.add_columns(self._columns)
        return self._start not in self._store.steps()

    def write(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the figures of a step. All files get the same columns, so that they are read as one table.

        Raises:
            QkovError: the disk is full, or cannot be written to; the step is left out.
        """
        with self._demand_written(f"step {step}"):
            self._write(step, rows)

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return self._store.table()

    @contextmanager
    def _demand_written(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QkovError(
                f"{what} could not be written to {self._store.folder} ({error.strerror or error}): the steps that are "
                f"there are whole; make room, then go on training, or from a saved step with start=STEP and resume=True"
            ) from error

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
        if self._columns and (added := [name for name in rows[0] if name not in self._columns]):
            self._store.add_columns(added)
        self._columns = list(dict.fromkeys([*self._columns, *rows[0]]))
        rows = [dict.fromkeys(self._columns) | row for row in rows]
        key = {"live": self._description["source"], "settings": self._description["settings"], "step": step}
        self._store.write(step, json.dumps(key | {"qkov": version("qkov")}, sort_keys=True), rows)

    def _demand_same(self, found: dict[str, Any], resume: bool) -> None:
        folder, source = self._store.folder, found.get("source")
        if not resume or not found.get("live"):
            way = ", or go on with it by resume=True and start=STEP" if found.get("live") else ""
            raise CallError(f"{folder} already holds the run {source}: give another folder{way}")
        for key in ("source", "settings"):
            if found.get(key) != self._description[key]:
                raise CallError(
                    f"{folder} was made with another {key} ({json.dumps(found.get(key))} instead of "
                    f"{json.dumps(self._description[key])}): give another folder"
                )


class MemoryStore:
    """What stands in for a run store where none is wanted."""

    def __init__(self, start: int) -> None:
        """Hold nothing yet."""
        self._start = start
        self.dropped: list[int] = []
        self._rows: dict[int, list[dict[str, Any]]] = {}

    def reference(self, layers: LayersInMemory) -> tuple[int, LayersInMemory]:
        """Return the layers given, and the step at which they are."""
        return self._start, layers

    def begin(self, reference: LayersInMemory | None) -> bool:  # noqa: ARG002
        """Say that the start is to be written."""
        return True

    def write(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Hold the figures of a step."""
        self._rows[step] = rows

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return table_of([row for rows in self._rows.values() for row in rows])
