"""Small stand-ins for the checkpoints of `shared/data`: random weights under the same names, in the same nesting."""

from pathlib import Path
from typing import Any

import torch

#: The steps of the stand-in of the rotary run; in the real one they go on to 20,000.
ROTARY_STEPS = (1, 500, 1000, 1500)


def write_stand_ins(folder: Path) -> Path:
    """Write rope_toy/, brackets/ and induction/ into a folder, and return it."""
    for step in ROTARY_STEPS:
        _save(folder / "rope_toy" / f"model_step_{step}.pt", _rotary(step))
    _save(folder / "brackets" / "brackets_model_state_dict.pt", _hooked())
    _save(folder / "induction" / "induction_head_infinite.pth", _heads_first())
    return folder


def _rotary(step: int) -> dict[str, Any]:
    """One layer of one rotary head in nn.Linear's layout, beside the state of its optimizer."""
    drawn = _drawing(step)
    weights = {f"W_{role}.weight": drawn(2, 4) for role in "QKV"} | {"W_O.weight": drawn(4, 2)}
    others = {
        "out_bias": drawn(16),
        "token_emb.weight": drawn(16, 4),
        "ln1.weight": drawn(4),
        "mlp.0.weight": drawn(16, 4),
    }
    moments = {number: {"step": torch.tensor(float(step)), "exp_avg": drawn(2, 4)} for number in range(4)}
    return {
        "step": step,
        "model_state_dict": others | weights,
        "optimizer_state_dict": {"state": moments, "param_groups": [{"lr": 1e-3, "params": [0, 1, 2, 3]}]},
        "train_loss": 2 / (1 + step),
        "val_loss": 3 / (1 + step),
    }


def _hooked() -> dict[str, torch.Tensor]:
    """Three layers of a TransformerLens model, with a mask and a buffer that are no weights."""
    drawn = _drawing(0)
    tensors = {"embed.W_E": drawn(5, 56), "pos_embed.W_pos": drawn(42, 56), "ln_final.w": drawn(56)}
    for layer in range(3):
        attention = {f"W_{role}": drawn(2, 56, 28) for role in "QKV"} | {"W_O": drawn(2, 28, 56)}
        attention |= {f"b_{role}": drawn(2, 28) for role in "QKV"} | {"b_O": drawn(56)}
        attention |= {"mask": torch.ones(42, 42, dtype=torch.bool).tril(), "IGNORE": torch.tensor(-1e5)}
        tensors |= {f"blocks.{layer}.attn.{name}": tensor for name, tensor in attention.items()}
        tensors |= {f"blocks.{layer}.ln1.w": drawn(56), f"blocks.{layer}.ln1.b": drawn(56)}
    return tensors | {"unembed.W_U": drawn(56, 2)}


def _heads_first() -> dict[str, Any]:
    """Two layers of [head, d_head, d_model] with the output as one nn.Linear, beside settings of the training."""
    drawn = _drawing(0)
    tensors = {"embed.W_E": drawn(48, 128), "pos_embed.W_pos": drawn(85, 48)}
    for layer in range(2):
        weights = {f"W_{role}": drawn(4, 12, 48) for role in "KQV"} | {"W_O": drawn(48, 48), "mask": torch.ones(85, 85)}
        tensors |= {f"attn_blocks.{layer}.attn.{name}": tensor for name, tensor in weights.items()}
    settings = {"num_layers": 2, "d_model": 48, "num_heads": 4, "d_head": 12, "pos_embed_type": "shortformer"}
    return {
        "model": tensors | {"unembed.W_U": drawn(48, 128)},
        "optimizer": {"state": {0: {"step": 3, "exp_avg": drawn(48, 128)}}, "param_groups": [{"lr": 1e-3}]},
        "train_losses": [3.0, 2.0, 1.0],
        "model_config": settings,
    }


def _drawing(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def _save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
