"""Time training under a circuit probe beside training without one.

Run as `python -m tests.benchmarks.circuit_probe [rounds]`. A GPT-2 of two layers, d_model 128, four heads, on batches
of 32 sequences of 64 tokens, with AdamW, in one process and one thread. Each round trains for 100 steps without a probe
and 100 with one at every=100 that writes its store, one step of the one and one of the other in turn, so that whatever
else the machine does falls on both; the ratio is that of the two sums. What a call of the probe costs is told beside
it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from qkov.probes import CircuitProbe

EVERY = 100
BATCH, LENGTH, WORDS = 32, 64, 1000


class Training:
    """A model and its optimizer."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step; the gradients stay."""
        self.optimizer.zero_grad()
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        return loss


def build() -> Any:
    """The model, always the same."""
    torch.manual_seed(0)
    sizes: Any = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def main() -> None:
    """Print the ratio of each round, and of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, 1 thread, batches of {BATCH} x {LENGTH}, every={EVERY}")
    plain, probed = Training(build()), Training(build())
    generator = torch.Generator().manual_seed(0)
    for training in (plain, probed):
        for _ in range(3):
            training.step(torch.randint(WORDS, (BATCH, LENGTH), generator=generator))
    totals = [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        probe = CircuitProbe(probed.model, Path(folder) / "run", EVERY)
        print(f"making the probe, which logs the start: {1000 * (time.perf_counter() - start):.1f} ms")
        for number in range(1, rounds + 1):
            sums, calls = [0.0, 0.0], []
            for _ in range(EVERY):
                tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
                start = time.perf_counter()
                plain.step(tokens)
                sums[0] += time.perf_counter() - start
                start = time.perf_counter()
                loss = probed.step(tokens)
                before = time.perf_counter()
                probe.step(loss)
                calls.append(time.perf_counter() - before)
                sums[1] += time.perf_counter() - start
            totals = [total + part for total, part in zip(totals, sums, strict=True)]
            print(
                f"round {number}: {sums[0]:.2f} s without, {sums[1]:.2f} s with, ratio {sums[1] / sums[0]:.4f}; "
                f"calls of the probe {100 * sum(calls) / sums[1]:.2f} % of it: the one that logs "
                f"{1000 * calls[-1]:.1f} ms, the one before it {1000 * calls[-2]:.2f} ms, "
                f"the others {1e6 * statistics.median(calls):.1f} us (median)"
            )
    print(f"all rounds: ratio {totals[1] / totals[0]:.4f}")


if __name__ == "__main__":
    main()
