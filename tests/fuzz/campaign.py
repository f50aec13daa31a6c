"""A campaign: inputs by number, each made from the seed and its number alone, read one after another."""

import gc
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch

from .arrays import array_input
from .data_sets import data_set_input
from .gguf_files import gguf_input
from .inputs import Generator, Input
from .mappings import mapping_input
from .pickles import torch_input
from .readers import READERS
from .stores import store_input
from .undamaged import undamaged
from .weights import config_input, index_input, safetensors_input
from .worker import BATCH, Outcome, outcomes

#: The kinds of inputs, each drawn equally often.
KINDS: dict[str, Generator] = {
    "safetensors": safetensors_input,
    "index": index_input,
    "pt": torch_input,
    "array": array_input,
    "gguf": gguf_input,
    "config": config_input,
    "mapping": mapping_input,
    "data set": data_set_input,
    "store": store_input,
}
_DESCRIPTION = "input.json"


@dataclass
class Findings:
    """The result of a campaign.

    Attributes:
        inputs: Number of inputs.
        outcomes: Number of inputs by kind and outcome.
        findings: The number of each input that was a finding, with its kind and its outcome.
        cpu: Seconds of CPU time that the input took which took longest.
        growth: Bytes by which memory grew most.
    """

    inputs: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[tuple[int, str, Outcome]] = field(default_factory=list)
    cpu: float = 0.0
    growth: int = 0


def input_numbered(seed: int, number: int) -> tuple[str, Input]:
    """Return the kind and the input of a number."""
    kind = list(KINDS)[number % len(KINDS)]
    return kind, KINDS[kind](random.Random(f"{seed} {number}"))


def campaign(
    seed: int = 0,
    inputs: int | None = None,
    seconds: float | None = None,
    first: int = 0,
    reproducers: Path | None = None,
) -> Findings:
    """Read inputs until there are enough of them, or the time is up.

    Args:
        seed: The seed.
        inputs: How many inputs to read.
        seconds: When to stop.
        first: The number of the first input.
        reproducers: The folder in which the files of each finding are kept.
    """
    result = Findings()
    stop = None if seconds is None else time.monotonic() + seconds
    with _prepared() as folder:
        numbered = (first + position for position in (count() if inputs is None else range(inputs)))
        made = ((number, partial(_made, seed, number)) for number in numbered)
        while some := list(islice(made, BATCH)):
            for number, outcome in outcomes(some, folder):
                _note(result, seed, number, outcome, reproducers)
            if stop is not None and time.monotonic() > stop:
                break
    return result


def keep(item: Input, folder: Path) -> None:
    """Keep an input in a folder from which `kept` returns it."""
    shutil.rmtree(folder, ignore_errors=True)
    item.write(folder / "files")
    (folder / _DESCRIPTION).write_text(json.dumps({"reader": item.reader, "address": item.address}))


def again(folder: Path) -> Outcome:
    """Read an input that was kept once more."""
    described = json.loads((folder / _DESCRIPTION).read_text())
    root = folder / "files"
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return outcome_of(Input(described["reader"], files, described["address"]))


def outcome_of(item: Input) -> Outcome:
    """Read one input."""
    with _prepared() as folder:
        ((_, outcome),) = outcomes([(0, lambda: item)], folder)
    return outcome


def _made(seed: int, number: int) -> Input:
    return input_numbered(seed, number)[1]


def _note(result: Findings, seed: int, number: int, outcome: Outcome, reproducers: Path | None) -> None:
    kind = list(KINDS)[number % len(KINDS)]
    result.inputs += 1
    result.outcomes[kind, outcome.kind] += 1
    result.cpu, result.growth = max(result.cpu, outcome.cpu), max(result.growth, outcome.growth)
    if outcome.is_finding:
        result.findings.append((number, kind, outcome))
        if reproducers is not None:
            keep(_made(seed, number), reproducers / f"{seed}-{number}-{outcome.kind.replace(' ', '-')}")


@contextmanager
def _prepared() -> Iterator[Path]:
    """Read undamaged inputs in this process, with one thread, so that no forked one has to set up anything."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="qkov-fuzz-") as name:
        folder = Path(name).resolve()
        for item in undamaged():
            sandbox = folder / "input"
            shutil.rmtree(sandbox, ignore_errors=True)
            item.write(sandbox)
            READERS[item.reader](sandbox / item.address if item.address else sandbox, sandbox)
        gc.collect()
        gc.freeze()
        try:
            yield folder
        finally:
            gc.unfreeze()
