"""Set the figures of a CircuitProbe in seven kinds of training loop beside dense algebra, and training without it.

Run as `python -m tests.benchmarks.loops`. A GPT-2 of two layers with three heads is trained for six steps of AdamW in
float64, by plain torch, accelerate, the Trainer, Lightning, two processes under DDP and two that share its parameters
under FSDP2; and with LoRA on its attention. Each is trained with a probe and without. The optimizer writes down the
weights before and after each step and the gradients that it finds. From these, with autograd's gradients of the
factors and dense matrices alone, come the figures of each step anew.

A line says whether the weights at the end are equal to the bit, and how far any figure of any row is from the dense
one at most, relative to it, or absolutely for cosines. With LoRA the factors have no gradients, so that the norm of the
step is the figure that remains.
"""

import json
import logging
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from qkov.circuits import open_model
from qkov.probes import CircuitProbe, CircuitProbeCallback, CircuitProbeLightningCallback
from torch import distributed
from torch.distributed.fsdp import fully_shard

from ..probes.circuit_models import language_loss, language_model

STEPS, HEADS, RATE = 6, 3, 1e-3
TOGETHER = ("DDP", "FSDP2")
LOOPS = ("plain", "accelerate", "Trainer", "Lightning", *TOGETHER, "LoRA")
COSINES = ("omega_cosine", "taken_exact_cosine", "taken_omega_cosine")


def build(loop: str) -> Any:
    """The model, always the same."""
    model = language_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if loop != "LoRA":
        return model
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()


def whole(tensor: Any) -> np.ndarray:
    """A tensor, gathered if it is spread over processes."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().numpy().copy()


class Noting(torch.optim.AdamW):
    """AdamW that writes down what it finds and what it leaves."""

    def __init__(self, model: Any) -> None:
        super().__init__([each for each in model.parameters() if each.requires_grad], RATE, weight_decay=0.01)
        self.model, self.noted = model, []

    def attention(self, of_gradients: bool) -> dict[str, np.ndarray]:
        """The weights or the gradients of attention by name; merged, where there are adapters."""
        if hasattr(self.model, "peft_config"):
            layers = open_model(self.model).layers()
            return {
                f"{layer.layer}.{name}": whole(getattr(layer, name))
                for layer in layers
                for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")
            }
        named = {
            name.split("transformer.")[-1]: each for name, each in self.model.named_parameters() if ".attn." in name
        }
        return {name: whole(each.grad if of_gradients else each) for name, each in named.items()}

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradients = {} if hasattr(self.model, "peft_config") else self.attention(of_gradients=True)
        before = self.attention(of_gradients=False)
        super().step()
        self.noted.append((before, gradients, self.attention(of_gradients=False)))
        return loss


def factors(weights: dict[str, np.ndarray], layer: int, circuit: str, head: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a head with their biases, of weights or of gradients."""
    if f"{layer}.W_Q" in weights:
        sides = {}
        for side in "QKV":
            weight, bias = weights[f"{layer}.W_{side}"][head], weights[f"{layer}.b_{side}"][head]
            sides[side] = np.concatenate([weight, bias[None]])
        return (sides["K"], sides["Q"].T) if circuit == "QK" else (weights[f"{layer}.W_O"][head].T, sides["V"].T)
    fused = weights[f"h.{layer}.attn.c_attn.weight"], weights[f"h.{layer}.attn.c_attn.bias"][None]
    query, key, value = np.split(np.concatenate(fused), 3, axis=1)
    width = query.shape[1] // HEADS
    part = slice(head * width, (head + 1) * width)
    if circuit == "QK":
        return key[:, part], query[:, part].T
    return weights[f"h.{layer}.attn.c_proj.weight"][part].T, value[:, part].T


def dense(noted: Any, layer: int, circuit: str, head: int) -> dict[str, float]:
    """The figures of a step from dense matrices."""
    (A, B), (A_after, B_after) = (factors(noted[place], layer, circuit, head) for place in (0, 2))
    taken = A_after @ B_after - A @ B
    figures = {"taken_step_norm": float(np.linalg.norm(taken))}
    if noted[1]:
        G_A, G_B = factors(noted[1], layer, circuit, head)
        exact = A @ G_B + G_A @ B
        U, _, V = np.linalg.svd(A @ B, full_matrices=False)
        rank = A.shape[1]
        polar = U[:, :rank] @ V[:rank]
        omega = polar @ B.T @ G_B + G_A @ A.T @ polar
        sizes = {name: np.linalg.norm(step) for name, step in (("exact", exact), ("omega", omega), ("taken", taken))}
        figures |= {
            "exact_step_norm": sizes["exact"],
            "omega_step_norm": sizes["omega"],
            "omega_cosine": (omega * exact).sum() / sizes["omega"] / sizes["exact"],
            "omega_relative_error": np.linalg.norm(omega - exact) / sizes["exact"],
            "taken_exact_cosine": -(taken * exact).sum() / sizes["taken"] / sizes["exact"],
            "taken_omega_cosine": -(taken * omega).sum() / sizes["taken"] / sizes["omega"],
            "taken_rate": -(taken * exact).sum() / sizes["exact"] ** 2,
        }
    return {name: float(value) for name, value in figures.items()}


def deviation(table: Any, noted: list[Any]) -> tuple[float, int]:
    """The largest deviation of any figure, and how many were compared."""
    largest, count = 0.0, 0
    for row in table[table["step"] > 0].to_dict("records"):
        for name, value in dense(noted[row["step"] - 1], row["layer"], row["circuit"], row["head"]).items():
            largest = max(largest, abs(row[name] - value) / (1.0 if name in COSINES else abs(value)))
            count += 1
    return largest, count


def trained(loop: str, *, watched: bool, rank: int = 0) -> tuple[dict[str, Any], Any, list[Any]]:
    """Train in a loop, and return the weights at the end, the rows, and what the optimizer wrote down."""
    model = build(loop)
    if loop == "Trainer":
        return by_trainer(model, watched)
    if loop == "Lightning":
        return by_lightning(model, watched)
    wrapped: Any = model
    if loop == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif loop == "FSDP2":
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    optimizer: Any = Noting(model)
    given, backward = optimizer, torch.Tensor.backward
    if loop == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        wrapped, given = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    probe = CircuitProbe(model, every=1, optimizer=given, on_error="raise") if watched else None
    for step in range(STEPS):
        loss = language_loss(wrapped, 10 * step + rank)
        backward(loss)
        given.step()
        given.zero_grad()
        if probe is not None:
            probe.step(loss.detach())
    table = None
    if probe is not None:
        probe.close()
        table = probe.table() if rank == 0 else None
    return {name: whole(each) for name, each in model.named_parameters()}, table, optimizer.noted


def by_trainer(model: Any, watched: bool) -> tuple[dict[str, Any], Any, list[Any]]:
    """Train by the Trainer of transformers, at a constant rate without clipping."""
    examples = torch.randint(20, (4 * STEPS, 8), generator=torch.Generator().manual_seed(0))
    callback, optimizer = CircuitProbeCallback(every=1, on_error="raise"), Noting(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=STEPS,
            max_grad_norm=0.0,
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in examples],
            callbacks=[callback] if watched else [],
            optimizers=(optimizer, schedule),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return (
        {name: whole(each) for name, each in model.named_parameters()},
        callback.probe.table() if watched else None,
        optimizer.noted,
    )


def by_lightning(model: Any, watched: bool) -> tuple[dict[str, Any], Any, list[Any]]:
    """Train by Lightning's Trainer with automatic optimization."""
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.optimizer = model, Noting(model)

        def training_step(self, seed: torch.Tensor) -> torch.Tensor:
            return language_loss(self.net, int(seed))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    module, callback = Module(), CircuitProbeLightningCallback(every=1, on_error="raise")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if watched else [],
    )
    trainer.fit(module, torch.utils.data.DataLoader([10 * step for step in range(STEPS)], batch_size=None))
    table = callback.probe.table() if watched else None
    return {name: whole(each) for name, each in model.named_parameters()}, table, module.optimizer.noted


def line(loop: str, rank: int = 0) -> str:
    """What is to be said of a loop."""
    plain, _, _ = trained(loop, watched=False, rank=rank)
    end, table, noted = trained(loop, watched=True, rank=rank)
    same = all(np.array_equal(plain[name], weights) for name, weights in end.items())
    if table is None:
        return ""
    largest, count = deviation(table, noted)
    return (
        f"{loop:<12}{'equal' if same else 'DIFFERENT':<12}{count:>6} figures, at most {largest:.1e} from dense algebra"
    )


def of_process(loop: str, rank: int, folder: Path) -> None:
    """Train as one of two processes; the first leaves its line in the folder."""
    meeting = (folder / "store").as_uri()
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=2, timeout=timedelta(minutes=5))
    said = line(loop, rank)
    if rank == 0:
        (folder / "line.json").write_text(json.dumps(said))
    distributed.destroy_process_group()


def main() -> None:
    """Print a line for each loop."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if len(sys.argv) == 4:
        of_process(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
        return
    print(f"{'loop':<12}{'weights':<12}")
    for loop in LOOPS:
        if loop not in TOGETHER:
            print(line(loop), flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                subprocess.Popen([sys.executable, "-m", "tests.benchmarks.loops", loop, str(rank), folder])
                for rank in (0, 1)
            ]
            ends = [process.wait() for process in processes]
            said = (Path(folder) / "line.json").read_text() if ends == [0, 0] else json.dumps(f"{loop}: failed, {ends}")
            print(json.loads(said), flush=True)


if __name__ == "__main__":
    main()
