"""One of two processes that share a model's parameters by fully_shard: trained in several ways, one after another.

Run as `python -m tests.probes.shared_loop RANK FOLDER`; the results of the first process are left in the folder.
"""

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from qkov.circuits import CallError, QkovError
from qkov.probes import CircuitProbe, CircuitProbeCallback
from qkov.probes.training import gathering
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import TrainerState

from .circuit_models import Classifier, language_loss, language_model, loss_of

STEPS = 6


def with_lora() -> Any:
    import peft

    model: Any = language_model("gpt2")
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()


def checkpointed() -> Any:
    # Activations are computed anew in training alone, where dropout would differ between processes.
    model = language_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable()
    return model.train()


def compiled() -> Any:
    model = language_model("gpt2")
    for block in model.transformer.h:
        block.compile(backend="eager")
    return model


#: How each kind of model is made, its loss for a seed, and the modules that are shared apart.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], torch.Tensor], Callable[[Any], Any]]] = {
    "gpt2": (lambda: language_model("gpt2"), language_loss, lambda model: model.transformer.h),
    "llama": (lambda: language_model("llama"), language_loss, lambda model: model.model.layers),
    "torch": (Classifier, loss_of, lambda model: [model.attention]),
    "lora": (with_lora, language_loss, lambda model: model.base_model.model.transformer.h),
    "checkpointed": (checkpointed, language_loss, lambda model: model.transformer.h),
    "compiled": (compiled, language_loss, lambda model: model.transformer.h),
}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 0.01)


def trained(kind: str, way: str, rank: int, folder: Path) -> None:
    """Train a model, watch it in some way, and leave its rows and its weights."""
    make, loss_of_kind, parts = KINDS[kind]
    model = make()
    for part in parts(model):
        fully_shard(part)
    fully_shard(model)
    optimizer = optimizer_of(model)
    callback = CircuitProbeCallback(folder / f"{kind} {way}", every=2, on_error="raise")
    state = TrainerState(is_world_process_zero=rank == 0)
    probe: CircuitProbe | None = None
    if way in ("given", "step", "hand"):
        given = optimizer if way == "given" else None
        probe = CircuitProbe(model, folder / f"{kind} {way}", every=2, optimizer=given, on_error="raise")
    elif way == "callback":
        callback.on_train_begin(None, state, None, model=model, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of_kind(model, 10 * step + rank)
        loss.backward()
        if way == "callback":
            callback.on_pre_optimizer_step(None, state, None, optimizer=optimizer)
        if way == "hand" and probe is not None:
            probe.begin_step()
        optimizer.step()
        if way == "callback":
            callback.on_optimizer_step(None, state, None)
        elif way == "hand" and probe is not None:
            probe.end_step()
        elif probe is not None:
            probe.step(loss)
    state_dict: dict[str, Any] = model.state_dict()
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state_dict.items()
    }
    if rank == 0:
        torch.save(whole, folder / f"{kind} {way}.pt")
    if probe is not None:
        probe.close()
        assert (probe.steps, probe.failures) == (STEPS, 0)
        # The numbers of this rank's own table are those of the store; the other one has none.
        try:
            rows = len(probe.table())
        except CallError as error:
            rows = str(error)
        (folder / f"{kind} {way} {rank}.json").write_text(json.dumps(rows))


def counted(rank: int) -> dict[str, Any]:
    """Return how many collectives between processes a probe causes at each step, beside those of training."""
    numbers = {}
    for every in (None, 3):
        model = language_model("gpt2")
        fully_shard(model)
        optimizer = optimizer_of(model)
        probe = None if every is None else CircuitProbe(model, every=every, optimizer=optimizer, on_error="raise")
        of_steps = []
        for step in range(STEPS):
            with torch.profiler.profile() as profiler:
                optimizer.zero_grad()
                language_loss(model, 10 * step + rank).backward()
                optimizer.step()
                if probe is not None:
                    probe.step()
            events = [event.name for event in profiler.events() or []]
            of_steps.append(sum(name.startswith("gloo:") or "c10d::" in name for name in events))
        numbers[str(every)] = of_steps
    return numbers


def failing(rank: int) -> dict[str, Any]:
    """Return what becomes of probes that the processes do not make or call alike."""

    def away(step: int, values: Any) -> None:
        if step:
            raise ConnectionError("away")

    ways: dict[str, Callable[[Any, Any], CircuitProbe | None]] = {
        "away": lambda model, optimizer: CircuitProbe(
            model, every=1, optimizer=optimizer, log=away if rank == 0 else None
        ),
        "alone": lambda model, optimizer: CircuitProbe(model, every=1, optimizer=optimizer),
        "settings": lambda model, optimizer: CircuitProbe(model, every=1 + rank, optimizer=optimizer),
        "refused": lambda model, optimizer: CircuitProbe(
            model, "pyproject.toml/no folder" if rank == 0 else None, optimizer=optimizer
        ),
        "function": lambda model, optimizer: CircuitProbe(
            model, every=lambda step: step % (1 + rank) == 0, optimizer=optimizer
        ),
        "lacking": lambda model, optimizer: CircuitProbe(model, optimizer=optimizer) if rank == 0 else None,
    }
    told: dict[str, Any] = {}
    for way, make in ways.items():
        model = language_model("gpt2")
        fully_shard(model)
        optimizer = optimizer_of(model)
        probe: CircuitProbe | None = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                probe = make(model, optimizer)
            except QkovError as error:
                told[way] = f"{type(error).__name__}: {error}"
            for step in range(3):
                optimizer.zero_grad()
                loss = language_loss(model, 10 * step + rank)
                loss.backward()
                optimizer.step()
                if probe is not None and (way != "alone" or rank == 0):
                    probe.step(loss)
        if probe is not None:
            probe.close()
            rows = sorted({int(step) for step in probe.table()["step"]}) if rank == 0 else None
            messages = [str(warning.message) for warning in caught if "failed" in str(warning.message)]
            told[way] = [probe.steps, probe.failures, rows, messages]
        distributed.barrier()
    return told


def main(rank: int, folder: Path) -> None:
    """Do everything."""
    torch.set_num_threads(1)
    gathering.PATIENCE = timedelta(seconds=4)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'at'}", rank=rank, world_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for way in ("none", "given", "step", "hand", "callback"):
            trained("gpt2", way, rank, folder)
        for kind in list(KINDS)[1:]:
            for way in ("none", "given"):
                trained(kind, way, rank, folder)
    messages = sorted({str(warning.message) for warning in caught if "process" in str(warning.message)})
    results = {"warnings": messages, "counted": counted(rank), "failing": failing(rank)}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
