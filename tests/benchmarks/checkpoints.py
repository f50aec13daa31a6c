"""Time the way from a model's file to the singular values of both circuits of every head, beside TransformerLens.

Run as `python -m tests.benchmarks.checkpoints [--repeats N] [--folder KEPT] [--write]`; the last puts the tables into
docs/speed.md. Random safetensors models of GPT-2-small and Pythia-410m shape; every measurement in its own process,
interleaved, imports not counted; medians. Both sides end in the basis of TransformerLens' compatibility mode. The floor
reads the same bytes and forms the bare Gram products of the factors in float64. The sweep measures a whole run, with
all that `qkov track` measures, in one worker and in two, of one thread each, the start of the workers counted.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .memory import peak_bytes

#: transformers' config class and sizes; the vocabulary too, since both are loaded whole by TransformerLens.
MODELS = {
    "GPT-2-small": ("GPT2Config", {}),
    "Pythia-410m": (
        "GPTNeoXConfig",
        {
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "intermediate_size": 4096,
            "vocab_size": 50304,
            "rotary_pct": 0.25,
        },
    ),
}
BASIS = "folded_centred"
#: Checkpoints of the run that one and two workers sweep.
SWEEP = 24
PAGE = Path(__file__).parents[2] / "docs" / "speed.md"
MARKS = ("<!-- checkpoints -->", "<!-- /checkpoints -->")


def build(name: str, folder: Path) -> None:
    """Save a random model, its norms' gains and biases random too."""
    import torch
    import transformers

    config_class, sizes = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def of_qkov(folder: Path) -> None:
    """From the file to all singular values, through the factors."""
    from qkov.circuits import AttentionWeights, open_checkpoint

    def total_of(weights: AttentionWeights) -> float:
        return sum(float(circuit.singular_values().sum()) for circuit in weights.circuits(BASIS).values())

    start = started()
    report(start, sum(open_checkpoint(folder).each_layer(total_of)))


def of_transformer_lens(folder: Path) -> None:
    """Boot, compatibility mode, and the SVD of `.QK` and `.OV`."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    transformers.logging.set_verbosity_error()
    start = started()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=model)
    bridge.enable_compatibility_mode(disable_warnings=True)
    total = float(bridge.QK.svd()[1].sum() + bridge.OV.svd()[1].sum())
    report(start, total)


def of_floor(folder: Path) -> None:
    """The same bytes read, and the four Gram matrices of every head in float64: nothing else."""
    import torch
    from qkov.circuits import open_checkpoint

    opened = open_checkpoint(folder)
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    wanted = [
        {role: header[name[0]] for role, name in opened.stacks[0].layers(opened.file.shapes)[layer].items()}
        for _, layer in opened.layer_keys
    ]
    heads = opened.stacks[0].heads
    start = started()
    total = 0.0
    with path.open("rb") as file:
        for layer in wanted:
            read = {}
            for role, entry in layer.items():
                first, last = entry["data_offsets"]
                file.seek(8 + length + first)
                read[role] = torch.frombuffer(bytearray(file.read(last - first)), dtype=torch.float32).view(
                    entry["shape"]
                )
            fused, output = read["QKV"], read["O"]
            d_model = output.shape[0]
            fused = fused if fused.shape[0] > d_model else fused.T
            for matrix in (*fused.reshape(3, heads, -1, d_model), output.reshape(heads, -1, d_model)):
                wide = matrix.double()
                total += float((wide @ wide.mT)[0, 0, 0])
    report(start, total)


def of_sweep(run: Path, workers: int) -> None:
    """A run of several checkpoints tracked into a new store; one worker is a process of its own here too."""
    import torch
    from qkov.analyses.trajectories import track

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as store:
        start = started()
        tracked = track(run, Path(store) / "store", workers=workers)
        report(start, float(len(tracked.measured)))


def of_composition(_folder: Path) -> None:
    """All composition scores, ours and TransformerLens', one after the other; the result is their ratio."""
    from tests.benchmarks.composition import GPT2_SMALL, composition_seconds

    start = time.perf_counter()
    seconds = composition_seconds(GPT2_SMALL)
    report(start, seconds["TransformerLens"] / seconds["qkov"])


def started() -> float:
    """The time, once what the imports left behind is collected, which would be counted wherever it falls."""
    gc.collect()
    return time.perf_counter()


def report(start: float, result: float) -> None:
    """Print what the parent reads: seconds, the peak resident memory of this process in MB, and a number to compare."""
    elapsed = time.perf_counter() - start
    print(json.dumps({"seconds": elapsed, "peak": peak_bytes() / 2**20, "result": result}), flush=True)


def measured(task: str, folder: Path) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.checkpoints", "--task", task, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{task} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the tables, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are made, and kept")
    parser.add_argument("--write", action="store_true", help="Write the tables into docs/speed.md.")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        run_task(given.task, given.folder)
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        lines = [*models_table(folder, given.repeats), "", *sentences(folder, max(1, given.repeats // 2))]
    print("\n".join(lines))
    if given.write:
        before, after = PAGE.read_text().split(MARKS[0])[0], PAGE.read_text().split(MARKS[1])[1]
        PAGE.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]))


def run_task(task: str, folder: Path) -> None:
    """What a child process does."""
    if task.startswith("sweep"):
        of_sweep(folder, int(task.removeprefix("sweep")))
        return
    tasks = {
        "qkov": of_qkov,
        "transformer_lens": of_transformer_lens,
        "floor": of_floor,
        "composition": of_composition,
    }
    tasks[task](folder)


def models_table(folder: Path, repeats: int) -> list[str]:
    """From file to singular values, beside TransformerLens and beside the floor."""
    lines = [
        "| from file to singular values | qkov | TransformerLens | times as fast | peak memory | floor | above floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        model = made(name, folder)
        times: dict[str, list[dict[str, float]]] = {"qkov": [], "transformer_lens": [], "floor": []}
        for _ in range(repeats):
            for task, found in times.items():
                found.append(measured(task, model))
        ours, theirs, floor = (statistics.median(one["seconds"] for one in times[task]) for task in times)
        our_peak, their_peak, _ = (max(one["peak"] for one in times[task]) for task in times)
        same = times["qkov"][0]["result"] / times["transformer_lens"][0]["result"]
        if abs(same - 1) > 1e-4:
            raise SystemExit(f"{name}: the sums of singular values differ, {same}")
        lines.append(
            f"| {name} | {ours:.2f} s | {theirs:.1f} s | {theirs / ours:.0f} | {our_peak:.0f} of {their_peak:.0f} MB "
            f"| {floor:.2f} s | {ours / floor:.1f} |"
        )
    return lines


def sentences(folder: Path, repeats: int) -> list[str]:
    """A sweep with one worker and with two, and composition."""
    run = swept(folder)
    times: dict[str, list[float]] = {"sweep1": [], "sweep2": []}
    for _ in range(repeats):
        for task, found in times.items():
            found.append(measured(task, run)["seconds"])
    one, two = (statistics.median(found) for found in times.values())
    ratio = statistics.median(measured("composition", folder)["result"] for _ in range(repeats))
    return [
        f"A run of {SWEEP} checkpoints of GPT-2-small shape, all figures: {one:.0f} s with one worker, {two:.0f} s "
        f"with two, {one / two:.2f} times as fast. Composition scores of all pairs of heads, GPT-2-small shape: "
        f"{ratio:.0f} times as fast as TransformerLens' `all_composition_scores`."
    ]


def made(name: str, folder: Path) -> Path:
    """The folder of a model, which is built where it is not there yet."""
    model = folder / name
    if not (model / "model.safetensors").exists():
        build(name, model)
    return model


def swept(folder: Path) -> Path:
    """A run whose checkpoints are one file under several names: what differs costs nothing more to measure."""
    model, run = made("GPT-2-small", folder), folder / "run"
    run.mkdir(exist_ok=True)
    for step in range(1, SWEEP + 1):
        checkpoint = run / f"checkpoint-{step}"
        if not checkpoint.exists():
            checkpoint.mkdir()
            for name in ("model.safetensors", "config.json"):
                os.link(model / name, checkpoint / name)
    return run


if __name__ == "__main__":
    main()
