"""The stores of a model in training: a run store on disk that can be read at any moment, or rows in memory."""

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
from torch import Tensor

from ...analyses.trajectories.store import RunStore, table_of
from ...circuits.errors import CallError, QkovError
from ...circuits.storage.atomic_write import write_atomically
from ...circuits.weights.attention_weights import BIASES, NAMES, AttentionWeights
from ...circuits.weights.source import LayersInMemory

#: The file of the weights with which the rows are compared.
_REFERENCE = "reference.safetensors"


class LiveStore:
    """A run store that grows with training; each step is written whole.

    Attributes:
        dropped: The steps that were deleted because training resumed from an earlier one.
    """

    def __init__(self, folder: Path | str, description: dict[str, Any], start: int, resume: bool) -> None:
        """Name the store; nothing is written yet.

        Args:
            folder: The store's folder.
            description: The content of run.json; a store that is resumed must have the same source and settings.
            start: The first step, at which the model has its current weights.
            resume: Whether to resume a store; its steps after `start` are deleted.

        Raises:
            CallError: The store exists and is not to be resumed, or belongs to another run.
        """
        self._store = RunStore(folder)
        self._description, self._start = json.loads(json.dumps(description)), start
        self.dropped: list[int] = []
        self._columns: list[str] = []
        self._is_new = not self._store.exists()
        if not self._is_new:
            stored = self._store.description()
            self._demand_same(stored, resume)
            self._description["reference_step"] = stored["reference_step"]

    def reference(self, layers: LayersInMemory) -> tuple[int, LayersInMemory]:
        """Return the step and the layers with which rows are compared.

        Args:
            layers: The current layers, which are the reference of a new store.

        Raises:
            QkovError: The store has lost its reference, or the reference belongs to another model.
        """
        step = self._description["reference_step"]
        return (step, layers) if self._is_new else (step, _read_reference(self._store.folder, layers))

    def begin(self, reference: LayersInMemory | None) -> bool:
        """Write run.json and delete the steps after the start.

        Args:
            reference: The layers with which rows are compared, which a new store keeps; None if there are none.

        Returns:
            Whether the start itself has yet to be written.

        Raises:
            QkovError: The disk is full, or cannot be written to.
        """
        with self._demand_written("the start of the store"):
            if self._is_new and reference is not None:
                _write_reference(self._store.folder, reference)
            self._store.describe(self._description)
            self.dropped = self._store.drop_after(self._start)
            self._columns = self._store.columns()
            # A writer that was killed while it added columns had begun with the first file.
            self._store.add_columns(self._columns)
        return self._start not in self._store.steps()

    def write(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a step. All files get the same columns, so that they can be read as one table.

        Args:
            step: The step.
            rows: One row for each layer, head and circuit.

        Raises:
            QkovError: The disk is full, or cannot be written to; the step is then missing from the store.
        """
        with self._demand_written(f"step {step}"):
            self._write(step, rows)

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return self._store.table()

    @contextmanager
    def _demand_written(self, content: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QkovError(
                f"{content} could not be written to {self._store.folder} ({error.strerror or error}): the steps "
                f"already there are whole; make room, then continue training, or resume from a saved step with "
                f"start=STEP and resume=True"
            ) from error

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
        if self._columns and (added := [name for name in rows[0] if name not in self._columns]):
            self._store.add_columns(added)
        self._columns = list(dict.fromkeys([*self._columns, *rows[0]]))
        rows = [dict.fromkeys(self._columns) | row for row in rows]
        key = {"live": self._description["source"], "settings": self._description["settings"], "step": step}
        self._store.write(step, json.dumps(key | {"qkov": version("qkov")}, sort_keys=True), rows)

    def _demand_same(self, stored: dict[str, Any], resume: bool) -> None:
        folder, source = self._store.folder, stored.get("source")
        if not resume or not stored.get("live"):
            remedy = ", or resume it with resume=True and start=STEP" if stored.get("live") else ""
            raise CallError(f"{folder} already holds the run {source}: give another folder{remedy}")
        for key, difference in (("source", "another source"), ("settings", "other settings")):
            if stored.get(key) != self._description[key]:
                raise CallError(
                    f"{folder} was made with {difference} ({json.dumps(stored.get(key))} instead of "
                    f"{json.dumps(self._description[key])}): give another folder"
                )


class MemoryStore:
    """Holds the rows in memory where no folder is given; it has the methods of `LiveStore`."""

    def __init__(self, start: int) -> None:
        """Hold no rows yet."""
        self._start = start
        self.dropped: list[int] = []
        self._rows: dict[int, list[dict[str, Any]]] = {}

    def reference(self, layers: LayersInMemory) -> tuple[int, LayersInMemory]:
        """Return the first step and the current layers."""
        return self._start, layers

    def begin(self, reference: LayersInMemory | None) -> bool:  # noqa: ARG002
        """Return True: the start has yet to be written."""
        return True

    def write(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Hold the rows of a step."""
        self._rows[step] = rows

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return table_of([row for rows in self._rows.values() for row in rows])


def _write_reference(folder: Path, layers: LayersInMemory) -> None:
    """Write the weights and biases of the layers into the store, whole or not at all."""
    tensors = {
        f"{weights.stack}/{weights.layer}/{name}": tensor.contiguous()
        for weights in layers.layers()
        for name, tensor in _tensors(weights).items()
    }
    write_atomically(folder / _REFERENCE, save(tensors))


def _read_reference(folder: Path, layers: LayersInMemory) -> LayersInMemory:
    """Return the layers with the weights and biases that the store holds."""
    try:
        tensors = load_file(folder / _REFERENCE)
    except (OSError, SafetensorError) as error:
        raise QkovError(
            f"{folder / _REFERENCE}, with which the run is compared, is missing or damaged: give another folder"
        ) from error
    referenced = []
    for weights in layers.layers():
        current = _tensors(weights)
        stored = {name: tensors.get(f"{weights.stack}/{weights.layer}/{name}") for name in current}
        for name, tensor in stored.items():
            if tensor is None or tensor.shape != current[name].shape:
                shape = "none" if tensor is None else f"one of shape {list(tensor.shape)}"
                raise QkovError(
                    f"the model has a {name} of shape {list(current[name].shape)} in {weights.label}, but the store "
                    f"{folder} was begun with {shape}: give another folder"
                )
        referenced.append(replace(weights, **stored))
    return LayersInMemory(tuple(referenced))


def _tensors(weights: AttentionWeights) -> dict[str, Tensor]:
    return {name: tensor for name in (*NAMES, *BIASES) if (tensor := getattr(weights, name)) is not None}
