"""Time one readout row of rollout beside the whole product, and measure what is held meanwhile.

Run as `OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout [repeats]`, on Linux. Random causal float32 maps, 1,024
tokens, 12 layers of 12 heads; both sides start from the same fused maps and take turns, median of the repeats. The
plain product multiplies the same maps in float32, already divided and mixed: the least that any product can take.
Fusing the heads, which both sides need, is timed apart. Memory is the peak of a process of its own above what it holds
with the maps of one layer at hand, as a model gives them.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from qkov.analyses.attention import FusedMaps

from .memory import held_bytes, peak_bytes, reset_peak

TOKENS, LAYERS, HEADS = 1024, 12, 12
MAP_BYTES = 4 * TOKENS**2


def layer_maps(generator: torch.Generator) -> torch.Tensor:
    """One layer's maps: causal and random."""
    maps = torch.rand(1, HEADS, TOKENS, TOKENS, generator=generator).tril_()
    return maps.div_(maps.sum(dim=-1, keepdim=True))


def collect() -> tuple[FusedMaps, float]:
    """Fuse every layer's maps as they come; return what is kept, and the seconds that fusing took."""
    generator = torch.Generator().manual_seed(0)
    kept, elapsed = FusedMaps(torch.ones(1, TOKENS, dtype=torch.bool)), 0.0
    for layer in range(LAYERS):
        maps = layer_maps(generator)
        start = time.perf_counter()
        kept(layer, maps)
        elapsed += time.perf_counter() - start
    return kept, elapsed


def plain_product(mixed: list[torch.Tensor]) -> torch.Tensor:
    """A_L ... A_1 and nothing else."""
    product = mixed[0]
    for layer in mixed[1:]:
        product = layer @ product
    return product


def times(repeats: int) -> dict[str, float]:
    """Median milliseconds of each way; the row has to be that of the whole."""
    kept, fusing = collect()
    readout = torch.tensor([TOKENS - 1])
    torch.testing.assert_close(kept.row(readout)[0], kept.matrix()[0, -1], rtol=1e-12, atol=1e-15)
    mixed = [layer.float() for layer in kept.mixed(0)]
    ways: dict[str, Callable[[], object]] = {
        "row": lambda: kept.row(readout),
        "matrix": kept.matrix,
        "plain float32 product": lambda: plain_product(mixed),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            # The first turn warms caches and thread pools.
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(found) for name, found in seconds.items()} | {"fusing heads": 1000 * fusing}


def print_memory() -> None:
    """Print how far the peak rises above one layer's maps until the row is there, in fused maps."""
    # Scratch that a first call of each operation takes for good.
    small = FusedMaps(torch.ones(1, 8, dtype=torch.bool))
    small(0, torch.ones(1, HEADS, 8, 8))
    small.row(torch.tensor([7]))
    maps = layer_maps(torch.Generator().manual_seed(0))
    before = held_bytes()
    reset_peak()
    kept = FusedMaps(torch.ones(1, TOKENS, dtype=torch.bool))
    for layer in range(LAYERS):
        kept(layer, maps)
    kept.row(torch.tensor([TOKENS - 1]))
    print((peak_bytes() - before) / MAP_BYTES)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        print_memory()
        return
    found = times(given.repeats)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.repeats} repeats")
    for name, median in found.items():
        print(f"{name:<24}{median:>10.1f} ms{median / found['row']:>8.1f}")
    command = [sys.executable, "-m", "tests.benchmarks.rollout", "--memory"]
    held = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"held above one layer's maps: {held:.1f} fused maps, for {LAYERS} layers")


if __name__ == "__main__":
    main()
