"""Time the spectra of every head of a model beside TransformerLens' FactoredMatrix.

Run as `python -m tests.benchmarks.spectra [repeats]`. Random float32 weights of the models' shapes, both sides
interleaved within one run, median of the repeats. TransformerLens has one way to its singular values,
`svd()`, so all three of ours are set against that; its norm goes through the same decomposition.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from qkov.circuits import Circuit
from transformer_lens import FactoredMatrix

SHAPES = {"GPT-2-small": (144, 768, 64), "Pythia-410m": (384, 1024, 64)}
THEIRS = "TransformerLens svd"


def milliseconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def methods(heads: int, d_model: int, d_head: int) -> dict[str, Callable[[], object]]:
    """The calls to time, all on the same weights; TransformerLens keeps its result, so each call makes anew."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(heads, d_model, d_head, generator=generator)
    right = torch.randn(heads, d_head, d_model, generator=generator)
    circuit = Circuit(left, right)
    return {
        THEIRS: lambda: FactoredMatrix(left, right).svd(),
        "qkov singular_values": circuit.singular_values,
        "qkov svd": circuit.svd,
        "qkov frobenius_norm": circuit.frobenius_norm,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=7)
    repeats = parser.parse_args().repeats
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {repeats} repeats")
    print(f"{'method':<22}{'shape':<30}{'median ms':>10}{'ratio':>8}")
    for model, shape in SHAPES.items():
        calls = methods(*shape)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(repeats + 1):
            for name, call in calls.items():
                elapsed = milliseconds(call)
                # The first turn warms caches and thread pools.
                if turn:
                    times[name].append(elapsed)
        theirs = statistics.median(times[THEIRS])
        for name, elapsed in times.items():
            median = statistics.median(elapsed)
            label = f"{model} {list(shape)}"
            print(f"{name:<22}{label:<30}{median:>10.1f}{theirs / median:>8.1f}")


if __name__ == "__main__":
    main()
