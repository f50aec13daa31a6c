"""Models whose projections are fused, and twins of them that hold W_Q, W_K and W_V apart."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from qkov.circuits import Mapping
from qkov.circuits.architectures.mapping import parse_mapping
from torch import Tensor, nn
from torch.nn.utils import parametrize

HEADS, VOCABULARY, LENGTH = 4, 30, 10


class Joined(nn.Module):
    """A fused weight formed of its three parts, whose places along a dimension are told one by one."""

    def __init__(self, places: tuple[list[int], list[int], list[int]], dimension: int) -> None:
        super().__init__()
        self.places, self.dimension = places, dimension
        self.order = torch.tensor([*places[0], *places[1], *places[2]]).argsort()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([query, key, value], self.dimension).index_select(self.dimension, self.order)

    def right_inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        return tuple(fused.index_select(self.dimension, torch.tensor(places)) for places in self.places)


@dataclass(frozen=True)
class Fused:
    """A tiny model, and where its fused projection keeps what.

    Attributes:
        name: of the test.
        build: makes the model.
        projection: path of the fused weight, with {layer}.
        output: path of the output projection's weight.
        places: of the rows of W_Q, W_K and W_V along the dimension.
        dimension: 0 where a weight is (out, in), 1 where it is (in, out).
        options: for recognising the model.
    """

    name: str
    build: Callable[[], nn.Module]
    projection: str
    output: str
    places: tuple[list[int], list[int], list[int]]
    dimension: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    layers: int = 2

    def model(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.to(dtype).train()

    def twin(self, model: nn.Module, *, biases: bool = False) -> nn.Module:
        """The same model at the same place, with the parts of its fused weights as parameters of their own."""
        twin = copy.deepcopy(model)
        for layer in range(self.layers):
            path, _, name = self.projection.format(layer=layer).rpartition(".")
            module = twin.get_submodule(path)
            parametrize.register_parametrization(module, name, Joined(self.places, self.dimension))
            if biases:
                parametrize.register_parametrization(module, name.replace("weight", "bias"), Joined(self.places, 0))
        return twin

    def mapping(self, *, biases: bool = False) -> Mapping:
        """Of the twin."""
        path, _, name = self.projection.rpartition(".")
        rows, columns = "(head d_head) d_model", "d_model (head d_head)"
        read, written = (columns, rows) if self.dimension else (rows, columns)
        parts = f"{path}.parametrizations.{name}" if path else f"parametrizations.{name}"
        tensors = {part: f"{parts}.original{at}" for at, part in enumerate("QKV")} | {"O": self.output}
        if biases:
            of_bias = parts.replace("weight", "bias")
            tensors |= {f"b_{part}": f"{of_bias}.original{at}" for at, part in enumerate("QKV")}
            tensors |= {"b_O": self.output.replace("weight", "bias")}
        layouts = dict.fromkeys("QKV", read) | {"O": written}
        return parse_mapping({"tensors": tensors, "layout": layouts, "heads": HEADS}, "the twin's mapping")


def one_after_another(queries: int, keys: int) -> tuple[list[int], list[int], list[int]]:
    """Places of q, k and v that lie one behind the other."""
    ends = (0, queries, queries + keys, queries + 2 * keys)
    query, key, value = (list(range(ends[at], ends[at + 1])) for at in range(3))
    return query, key, value


def alternating(groups: int, queries: int, d_head: int) -> tuple[list[int], list[int], list[int]]:
    """Places where each group has its queries, its key and its value side by side."""
    query, key, value = [], [], []
    for group in range(groups):
        first = group * (queries + 2) * d_head
        query += range(first, first + queries * d_head)
        key += range(first + queries * d_head, first + (queries + 1) * d_head)
        value += range(first + (queries + 1) * d_head, first + (queries + 2) * d_head)
    return query, key, value


class NanoBlock(nn.Module):
    """A layer with nanoGPT's names: linear layers whose weights are (out, in)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d_model)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(d_model, 3 * d_model), "c_proj": nn.Linear(d_model, d_model)})
        self.ln_2 = nn.LayerNorm(d_model)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(d_model, 32), "c_proj": nn.Linear(32, d_model)})

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attn["c_proj"](attended.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """A decoder with nanoGPT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, 24),
                "wpe": nn.Embedding(LENGTH, 24),
                "h": nn.ModuleList([NanoBlock(24) for _ in range(2)]),
                "ln_f": nn.LayerNorm(24),
            }
        )
        self.lm_head = nn.Linear(24, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(LENGTH))
        for block in self.transformer["h"]:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        block = nn.TransformerEncoderLayer(24, HEADS, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def of_transformers(name: str, **settings: Any) -> Callable[[], nn.Module]:
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    model = {"GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    return lambda: getattr(transformers, name + model)(getattr(transformers, f"{name}Config")(**tokens, **settings))


def _no_dropout(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


_SIZES = {"num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 32}

FUSED = [
    Fused(
        "GPT-2",
        of_transformers(
            "GPT2", n_embd=24, n_layer=2, n_head=HEADS, **_no_dropout("resid_pdrop", "embd_pdrop", "attn_pdrop")
        ),
        "transformer.h.{layer}.attn.c_attn.weight",
        "transformer.h.{layer}.attn.c_proj.weight",
        one_after_another(24, 24),
        dimension=1,
    ),
    Fused(
        "GPT-NeoX",
        of_transformers("GPTNeoX", hidden_size=32, **_SIZES),
        "gpt_neox.layers.{layer}.attention.query_key_value.weight",
        "gpt_neox.layers.{layer}.attention.dense.weight",
        alternating(groups=HEADS, queries=1, d_head=8),
    ),
    Fused(
        "Phi-3, grouped heads",
        of_transformers("Phi3", hidden_size=32, num_key_value_heads=2, **_SIZES),
        "model.layers.{layer}.self_attn.qkv_proj.weight",
        "model.layers.{layer}.self_attn.o_proj.weight",
        one_after_another(32, 16),
    ),
    Fused(
        "BLOOM",
        of_transformers("Bloom", hidden_size=24, n_layer=2, n_head=HEADS),
        "transformer.h.{layer}.self_attention.query_key_value.weight",
        "transformer.h.{layer}.self_attention.dense.weight",
        alternating(groups=HEADS, queries=1, d_head=6),
    ),
    Fused(
        "Falcon, grouped heads",
        of_transformers("Falcon", hidden_size=32, new_decoder_architecture=True, num_kv_heads=2, **_SIZES),
        "transformer.h.{layer}.self_attention.query_key_value.weight",
        "transformer.h.{layer}.self_attention.dense.weight",
        alternating(groups=2, queries=2, d_head=8),
    ),
    Fused(
        "Falcon, one key-value head",
        of_transformers("Falcon", hidden_size=32, multi_query=True, **_SIZES),
        "transformer.h.{layer}.self_attention.query_key_value.weight",
        "transformer.h.{layer}.self_attention.dense.weight",
        one_after_another(32, 8),
    ),
    Fused(
        "nanoGPT",
        NanoGPT,
        "transformer.h.{layer}.attn.c_attn.weight",
        "transformer.h.{layer}.attn.c_proj.weight",
        one_after_another(24, 24),
        options=(("heads", HEADS),),
    ),
    Fused(
        "torch.nn.MultiheadAttention",
        Encoder,
        "encoder.layers.{layer}.self_attn.in_proj_weight",
        "encoder.layers.{layer}.self_attn.out_proj.weight",
        one_after_another(24, 24),
    ),
]
BY_NAME = {fused.name: fused for fused in FUSED}


def batches(steps: int) -> Iterator[Tensor]:
    """The same batches of tokens every time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randint(2, VOCABULARY, (4, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Each token predicts the next one."""
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 100, schedule: Any = None) -> None:
    """Train on the batches; after each step the schedule moves on, where there is one."""
    for tokens in batches(steps):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def largest_difference(model: nn.Module, twin: nn.Module, *, matrices: bool = False) -> float:
    """The largest difference of any entry of the model's parameters, or matrices, from that of its twin."""
    differences = []
    for name, parameter in model.named_parameters():
        if matrices and parameter.ndim < 2:
            continue
        path, _, last = name.rpartition(".")
        other = getattr(twin.get_submodule(path), last)
        differences.append((parameter - other).abs().max().item())
    return max(differences)
