"""Small models to train under a circuit probe, and the same attention by dense products."""

from typing import Any

import numpy as np
import torch
from torch import nn

HEADS, D_MODEL, TOKENS, CLASSES = 2, 8, 5, 3


class Classifier(nn.Module):
    """Attention of torch, whose Q, K and V are fused, with biases of ordinary size, read at the last token."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(D_MODEL, HEADS, bias=bias, batch_first=True)
        self.readout = nn.Linear(D_MODEL, CLASSES)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, x):
        return self.readout(self.attention(x, x, x, need_weights=False)[0][:, -1])

    def factors(self) -> dict[str, tuple[list[Any], list[Any]]]:
        """A and B of each head by hand, with the biases as one row or column more."""
        width = D_MODEL // HEADS
        Q, K, V = (
            torch.cat([W, b[:, None]], dim=1).detach().clone()
            for W, b in zip(self.attention.in_proj_weight.chunk(3), self.attention.in_proj_bias.chunk(3), strict=True)
        )
        O = self.attention.out_proj.weight.detach().clone()  # noqa: E741
        rows = [slice(head * width, (head + 1) * width) for head in range(HEADS)]
        return {
            "QK": ([K[part].T for part in rows], [Q[part] for part in rows]),
            "OV": ([O[:, part] for part in rows], [V[part] for part in rows]),
        }

    def by_products(self, W_QK, W_OV, x):
        """The same output by products that are given, one for each head."""
        stream = torch.cat([x, torch.ones(*x.shape[:-1], 1, dtype=x.dtype)], dim=-1)
        scale = (D_MODEL // HEADS) ** -0.5
        written = sum(
            (scale * stream @ QK.T @ stream.mT).softmax(dim=-1) @ stream @ OV.T
            for QK, OV in zip(W_QK, W_OV, strict=True)
        )
        return self.readout((written + self.attention.out_proj.bias)[:, -1])


def batch(seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, TOKENS, D_MODEL, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (6,), generator=generator)


def loss_of(model, seed: int):
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x), y)


def language_model(kind: str, **changes) -> Any:
    """A causal language model of transformers of one or two layers, with weights of ordinary size, in float64."""
    sizes = {
        "gpt2": {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16},
        "llama": {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    }[kind]
    # Slow to load, for what needs no such model.
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=20, bos_token_id=0, eos_token_id=1, **sizes, **changes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def language_loss(model, seed: int):
    tokens = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def dense_omega(C, G):
    U, S, V = (torch.from_numpy(part) for part in np.linalg.svd(C.numpy(), full_matrices=False))
    return (U * S) @ U.T @ G + G @ V.T @ (S[:, None] * V)


def cosine(one, other):
    return float((one * other).sum() / (one.norm() * other.norm()))
