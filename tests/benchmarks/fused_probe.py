"""Time and memory of a probe on fused attention beside the forward alone and beside eager attention with its maps.

Run as `python -m tests.benchmarks.fused_probe [repeats]`, on Linux. A random model of GPT-2 small's shape, one sequence
of 512 and of 2,048 tokens, float32, without gradients, on one thread; every measure with a relevant mask. Ways of
calling it take turns; times are those of the processor, and a ratio is the median of the ratios within a turn. Memory
is the peak (VmHWM) of a process of its own above what it holds before the call, with a vocabulary of 1,000: the logits
of the whole one would hide the rest.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from qkov.probes import AttentionProbe

from .memory import printed_in_a_process, rise

LENGTHS, VOCABULARY = (512, 2048), 50257
ALONE = "sdpa, forward alone"


def gpt2_small(kind: str, vocabulary: int) -> Any:
    """A random model of GPT-2 small's shape."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=vocabulary, n_positions=2048, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = kind
    return transformers.GPT2LMHeadModel(config).eval()


def ways(tokens: int, vocabulary: int = VOCABULARY) -> dict[str, Callable[[], object]]:
    """Ways of calling the model, by name; each has a model of its own, which is made when it is first called."""
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(1))
    relevant = torch.arange(tokens) % 7 == 0
    models: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in models:
            models[kind] = gpt2_small(kind, vocabulary)
        return models[kind]

    def probed(kind: str) -> None:
        with AttentionProbe(model(kind), relevant=relevant):
            model(kind)(ids)

    return {
        ALONE: lambda: model("sdpa")(ids),
        "sdpa, AttentionProbe": lambda: probed("sdpa"),
        "eager, forward alone": lambda: model("eager")(ids),
        "eager, output_attentions": lambda: model("eager")(ids, output_attentions=True),
        "eager, AttentionProbe": lambda: probed("eager"),
    }


def times(tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, turn by turn."""
    called = ways(tokens)
    seconds: dict[str, list[float]] = {name: [] for name in called}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for name, call in called.items():
                start = time.process_time()
                call()
                # The first turn makes the models and warms caches.
                if turn:
                    seconds[name].append(time.process_time() - start)
    return seconds


def print_peak(tokens: int, way: str) -> None:
    """Print how far the peak of one call rises above what is held before."""
    called = ways(tokens, 1000)
    with torch.no_grad():
        called[way]()
        print(rise(called[way]))


def peak(tokens: int, way: str) -> int:
    """The rise of one way's peak, in a process of its own."""
    return printed_in_a_process("tests.benchmarks.fused_probe", "--peak", str(tokens), way)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=5)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.peak:
        print_peak(int(given.peak[0]), given.peak[1])
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {given.repeats} repeats")
    print(f"{'':<38}{'ms':>8}{'of forward':>12}{'MiB':>10}{'of forward':>12}")
    for tokens in LENGTHS:
        seconds = times(tokens, given.repeats)
        alone = peak(tokens, ALONE)
        for way, found in seconds.items():
            ratio = statistics.median(one / base for one, base in zip(found, seconds[ALONE], strict=True))
            size = alone if way == ALONE else peak(tokens, way)
            print(
                f"{f'{tokens} tokens, {way}':<38}{1000 * statistics.median(found):>8.0f}{ratio:>12.2f}"
                f"{size / 2**20:>10.0f}{size / alone:>12.2f}"
            )


if __name__ == "__main__":
    main()
