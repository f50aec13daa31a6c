"""Time one log of a probe of training beside the spectra of the model's circuits, and opening a store of many logs.

Run as `python -m tests.benchmarks.probe_log [rounds]`, with `--logs 10000` for the second part too. A GPT-2 of the
small shape (144 heads, 288 circuits of [768, 64] [64, 768]) takes steps of SGD; what is timed is the log of a step with
all its columns, without the model's own work. In turn with it, in the same run, come the singular value decompositions
of as many circuits by TransformerLens and by qkov. The ratio is that of the medians.

The second part writes so many logs of a model with two layers of four heads, and times `RunStore.steps` and
`RunStore.table` in the store that they leave.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from qkov.analyses.trajectories import RunStore
from qkov.circuits import Circuit
from qkov.probes import CircuitProbe
from transformer_lens import FactoredMatrix

HEADS, D_MODEL, D_HEAD = 144, 768, 64


def build(**sizes: Any) -> Any:
    """A GPT-2 with few words, since only its attention matters here."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


def seconds(work: Any) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def a_log(rounds: int) -> None:
    """Print the ratios of a log to the spectra."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    tokens = torch.randint(100, (1, 16), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(2 * HEADS, D_MODEL, D_HEAD, generator=generator)
    right = torch.randn(2 * HEADS, D_HEAD, D_MODEL, generator=generator)
    times: dict[str, list[float]] = {"log": [], "step": [], "TransformerLens svd": [], "qkov svd": []}
    with tempfile.TemporaryDirectory() as folder:
        probe = CircuitProbe(model, Path(folder) / "run", every=lambda step: step % 2 == 0, optimizer=optimizer)
        for turn in range(rounds + 1):
            spent = {}
            for name in ("step", "log"):
                optimizer.zero_grad()
                model(tokens, labels=tokens).loss.backward()
                spent[name] = seconds(optimizer.step)
            spent["TransformerLens svd"] = seconds(FactoredMatrix(left, right).svd)
            spent["qkov svd"] = seconds(Circuit(left, right).svd)
            if turn:
                for name, value in spent.items():
                    times[name].append(value)
        probe.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    log = medians["log"] - medians["step"]
    print(f"a log of {2 * HEADS} circuits: {1000 * log:.0f} ms")
    for name in ("TransformerLens svd", "qkov svd"):
        print(
            f"  {name} of as many: {1000 * medians[name]:.0f} ms; the log takes {log / medians[name]:.2f} times as long"
        )


def many_logs(logs: int) -> None:
    """Print how long it takes to open a store of many logs."""
    model = build(n_layer=2, n_embd=32, n_head=4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    tokens = torch.randint(100, (1, 8), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        probe = CircuitProbe(model, run, every=1, optimizer=optimizer)
        start = time.perf_counter()
        for _ in range(logs):
            optimizer.zero_grad()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            probe.step(loss)
        written = time.perf_counter() - start
        probe.close()
        files = sum(1 for path in run.rglob("*") if path.is_file())
        store = RunStore(run)
        steps, table = seconds(store.steps), seconds(store.table)
        print(
            f"{logs} logs of 8 heads, {1000 * written / logs:.1f} ms each with their training step: {files} files; "
            f"the steps are known after {steps:.2f} s, all {len(store.table())} rows are there after {table:.2f} s more"
        )


def main() -> None:
    """Print both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument(
        "--logs", type=int, default=0, help="How many logs to write for the second part. Default: none."
    )
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} rounds")
    a_log(arguments.rounds)
    if arguments.logs:
        many_logs(arguments.logs)


if __name__ == "__main__":
    main()
