"""The stores of a model in training: a run store on disk that can be read at any moment, or rows in memory."""

import json
import math
import uuid
import warnings
from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager, suppress
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
from ...circuits.weights.layer_keys import layer_name
from ...circuits.weights.source import LayersInMemory

#: The file of the weights with which the rows are compared.
_REFERENCE = "reference.safetensors"
#: The columns that say what a row of a step measures.
_PLACE = ["stack", "layer", "head", "circuit"]
#: Saving weights in bfloat16 changes each entry by up to 2^-9 of itself, at random, and so a norm over n entries by
#: about 2^-8.5 / sqrt(n) of itself. Norms count as the same up to this share, divided by sqrt(n).
_SAME = 2.0**-6


class LiveStore:
    """A run store that grows with training; each step is written whole, and nothing in it is ever deleted.

    The store is that of the probe that began or resumed it last; another one, as in a notebook's cell that was run
    again, can write to it no more.

    Attributes:
        warnings: What the user should know about how the store was resumed.
    """

    def __init__(self, folder: Path | str, description: dict[str, Any], start: int | None, resume: bool) -> None:
        """Name the store; nothing is written yet.

        Args:
            folder: The store's folder.
            description: The content of run.json; a store that is resumed must have the same source and settings.
            start: The first step, at which the model has its current weights.
            resume: Whether to resume a store; its steps after `start` are moved aside.

        Raises:
            CallError: The store exists and is not to be resumed, or belongs to another run; or `start` is not stated.
        """
        self._store = RunStore(folder)
        self._description = json.loads(json.dumps(description)) | {"writer": uuid.uuid4().hex}
        self.warnings: list[str] = []
        self._columns: list[str] = []
        self._reference: LayersInMemory | None = None
        self._is_new = not self._store.exists()
        if not self._is_new:
            stored = self._store.description()
            self._demand_same(stored, resume)
            if start is None:
                steps = self._store.steps()
                upto = f"steps up to {steps[-1]}" if steps else "no step yet"
                raise CallError(
                    f"{folder} holds {upto}: state from which step training goes on, as start=STEP, or give another "
                    f"folder"
                )
            self._description["reference_step"] = stored["reference_step"]

    def reference(self, start: int, layers: LayersInMemory) -> tuple[int, LayersInMemory]:  # noqa: ARG002
        """Return the step and the layers with which rows are compared.

        Args:
            start: The first step.
            layers: The current layers, which are the reference of a new store.

        Raises:
            QkovError: The store has lost its reference, or the reference belongs to another model.
        """
        step = self._description["reference_step"]
        return (step, layers) if self._is_new else (step, _read_reference(self._store.folder, layers))

    def begin(self, start: int, reference: LayersInMemory | None, rows: list[dict[str, Any]]) -> bool:
        """Write run.json and move the steps after the start aside.

        Args:
            start: The first step.
            reference: The layers with which rows are compared, which a new store keeps; None if there are none.
            rows: The rows of the current weights.

        Returns:
            Whether the start itself has yet to be written.

        Raises:
            CallError: The weights are not those of the store's row of this step.
            QkovError: The disk is full, or cannot be written to.
        """
        self._demand_same_weights(start, rows)
        self._reference = reference
        with self._demand_written("the start of the store"):
            if self._is_new:
                self._write_reference()
            self._store.describe(self._description)
            self._store.remove_twice_written()
            moved, folder = self._store.move_aside(start)
            if moved:
                self.warnings.append(
                    f"{self._store.folder} resumes from step {start}: its later steps, {len(moved)} of them, up to "
                    f"step {moved[-1]}, were moved to {folder}"
                )
            self._columns = self._store.columns()
            # A writer that was killed while it added columns had begun with the first file.
            self._store.add_columns(self._columns)
        return start not in self._store.steps()

    def _demand_same_weights(self, start: int, rows: list[dict[str, Any]]) -> None:
        """Refuse weights whose norms are not those of the row of the step that they are said to be of."""
        if self._is_new:
            return
        if start not in self._store.steps():
            self.warnings.append(
                f"{self._store.folder} has no row of step {start}, so whether these are the weights of its run at that "
                f"step was not checked"
            )
            return
        norms = {
            tuple(row[name] for name in _PLACE): row["frobenius_norm"]
            for row in self._store.rows_of(start).to_dict("records")
        }
        for row in rows:
            place = stack, layer, head, circuit = tuple(row[name] for name in _PLACE)
            norm, earlier = row["frobenius_norm"], norms.get(place)
            entries = row["rank_bound"] * min(row["rows"], row["columns"])
            if earlier is None or not math.isclose(norm, earlier, rel_tol=_SAME / math.sqrt(entries), abs_tol=0.0):
                stated = "missing" if earlier is None else f"{earlier:.6g}"
                raise CallError(
                    f"the weights are not those of step {start} of {self._store.folder}: the norm of {circuit} of "
                    f"{layer_name(stack, layer)}, head {head}, is {norm:.6g}, and {stated} in the store; load the "
                    f"weights of step {start}, state the step that they are of, or give another folder"
                )

    def write(self, step: int, rows: list[dict[str, Any]], numbers: Dictionary[str, float]) -> None:
        """Write the rows of a step. All files get the same columns, so that they can be read as one table.

        Args:
            step: The step.
            rows: One row for each layer, head and circuit.
            numbers: The numbers of the step, such as its loss, by name.

        Raises:
            QkovError: The disk is full, or cannot be written to; the step is then missing from the store.
        """
        self._demand_own()
        with self._demand_written(f"step {step}"):
            self._store.add_numbers(step, numbers)
            self._write(step, rows)
        with self._demand_written("the file of many steps"):
            self._store.gather()

    def add_numbers(self, step: int, numbers: Dictionary[str, float]) -> None:
        """Note numbers that became known after a step was written.

        Args:
            step: The step.
            numbers: The numbers by name.

        Raises:
            QkovError: The disk is full, or cannot be written to.
        """
        self._demand_own()
        with self._demand_written(f"the numbers of step {step}"):
            self._store.add_numbers(step, numbers)

    def note_failures(self, count: int, last: str) -> None:
        """State in run.json that measurements failed: at the first, the second, the fourth, ... and with each step.

        Args:
            count: How many failed until now.
            last: What failed last, in words.
        """
        self._description["failures"] = {"count": count, "last": last}
        if count & (count - 1) == 0:
            with suppress(OSError, QkovError):
                self._demand_own()

    def note_untested(self, untested: list[dict[str, Any]]) -> None:
        """State in run.json, with the next step, which circuits lack quantities of a step.

        Args:
            untested: The circuits with the reasons, as in run.json.
        """
        self._description["untested"] = untested

    def _demand_own(self) -> None:
        """Make a store whole again that was deleted, refuse one that another probe has resumed, and state what is new.

        Raises:
            QkovError: Another probe writes to the store, or it cannot be written to.
        """
        folder = self._store.folder
        if not self._store.exists():
            with self._demand_written("the store"):
                self._write_reference()
                self._store.describe(self._description)
            warnings.warn(
                f"the store {folder} was deleted while the model was trained; it begins again, without the steps that "
                f"it held",
                stacklevel=6,
            )
            return
        stored = self._store.description()
        if stored.get("writer") != self._description["writer"]:
            raise QkovError(f"another probe writes to {folder} by now, so this one writes to it no more")
        if any(stored.get(key) != self._description.get(key) for key in ("failures", "untested")):
            with self._demand_written("the description of the run"):
                self._store.describe(self._description)

    def _write_reference(self) -> None:
        if self._reference is not None:
            _write_reference(self._store.folder, self._reference)

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

    def __init__(self) -> None:
        """Hold no rows yet."""
        self.warnings: list[str] = []
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._numbers: dict[int, dict[str, float]] = {}

    def reference(self, start: int, layers: LayersInMemory) -> tuple[int, LayersInMemory]:
        """Return the first step and the current layers."""
        return start, layers

    def begin(self, start: int, reference: LayersInMemory | None, rows: list[dict[str, Any]]) -> bool:  # noqa: ARG002
        """Return True: the start has yet to be written."""
        return True

    def write(self, step: int, rows: list[dict[str, Any]], numbers: Dictionary[str, float]) -> None:
        """Hold the rows and the numbers of a step."""
        self._rows[step] = rows
        self.add_numbers(step, numbers)

    def add_numbers(self, step: int, numbers: Dictionary[str, float]) -> None:
        """Hold numbers of a step."""
        self._numbers.setdefault(step, {}).update(numbers)

    def note_failures(self, count: int, last: str) -> None:
        """Note nothing: the probe itself knows its failures."""

    def note_untested(self, untested: list[dict[str, Any]]) -> None:
        """Note nothing: there is no run.json."""

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return table_of([row for rows in self._rows.values() for row in rows], self._numbers)


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
