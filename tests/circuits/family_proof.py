"""The proof of a family: attention computed from the extracted weights alone is the model's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from qkov.circuits import AttentionWeights, open_checkpoint
from torch import Tensor, nn

from .forward_pass import attend

LENGTH = 12
#: The models compute in float64; what they keep in float32 (rotary tables, ALiBi) leaves differences of this order.
TOLERANCE = 1e-5
SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """A tiny model of transformers, and where its attention is.

    Attributes:
        name: of the test.
        config: makes the config.
        model: class in transformers.
        block: path of a module of a layer whose first input is the residual stream that attention, or its norm, reads.
        attention: path of the module whose output is the attention's.
        stack: as qkov names it.
        layers: numbers of the layers that qkov should find.
        inputs: makes the model's inputs of the config; token ids if not given.
        source: path of the module whose output the keys and values of cross-attention read.
        patterns: path of what of the model's output holds the attention patterns of the stack.
        bias: what the model adds to the scores of a layer, [head, query, key]; none if not given.
        sinks: the learned scores of a layer that are no token's, [head]; none if not given.
        heads: number of query heads, where without a config neither names nor shapes tell it.
        dtype: to compute in, for models that cannot do float64.
    """

    name: str
    config: Callable[[], Any]
    model: str
    block: str
    attention: str
    stack: str = ""
    layers: Sequence[int] = (0, 1)
    inputs: Callable[[Any], dict[str, Tensor]] | None = None
    source: str | None = None
    patterns: str = "attentions"
    bias: Callable[[Any, int], Tensor] | None = None
    sinks: Callable[[Any, int], Tensor] | None = None
    heads: int | None = None
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Seen:
    """Of one layer, what came in, the pattern [head, query, key] and what attention gave out [query, d_model]."""

    residual: Tensor
    source: Tensor | None
    pattern: Tensor
    output: Tensor


def small(name: str, **changes: Any) -> Any:
    """A tiny config of transformers' commonest keys."""
    settings = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 50,
        "max_position_embeddings": 32,
    }
    return getattr(transformers, name)(**(settings | changes))


def build(family: Family) -> Any:
    """The model with weights of ordinary size everywhere, biases and gains among them."""
    torch.manual_seed(0)
    config = family.config()
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, family.model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(family.dtype).eval()


def run(family: Family, model: Any) -> dict[int, Seen]:
    """What every layer of the family's stack does with one sequence."""
    caught: dict[tuple[str, int | None], Tensor] = {}
    handles = []

    def catch(kind: str, layer: int | None) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> None:
            given = output if kind != "residual" else (args[0] if args else kwargs["hidden_states"])
            caught[kind, layer] = (given if isinstance(given, Tensor) else given[0])[0]

        return hook

    for layer in family.layers:
        block = model.get_submodule(family.block.format(layer=layer))
        attention = model.get_submodule(family.attention.format(layer=layer))
        handles.append(block.register_forward_pre_hook(catch("residual", layer), with_kwargs=True))
        handles.append(attention.register_forward_hook(catch("output", layer), with_kwargs=True))
    if family.source is not None:
        source = model.get_submodule(family.source)
        handles.append(source.register_forward_hook(catch("source", None), with_kwargs=True))
    torch.manual_seed(1)
    inputs = family.inputs(model.config) if family.inputs else {"input_ids": torch.randint(3, 50, (1, LENGTH))}
    with torch.no_grad():
        patterns = attrgetter(family.patterns)(model(**inputs, output_attentions=True))
    for handle in handles:
        handle.remove()
    # Some models give nothing for layers without attention, others None.
    of_layer = zip(family.layers, (pattern[0] for pattern in patterns if pattern is not None), strict=True)
    source = caught.get(("source", None))
    return {
        layer: Seen(caught["residual", layer], source, pattern, caught["output", layer]) for layer, pattern in of_layer
    }


def read(model: Any, folder: Path, stack: str) -> list[AttentionWeights]:
    """The layers of a stack, from the model as transformers saves it."""
    model.save_pretrained(folder)
    return [weights for weights in open_checkpoint(folder).layers() if weights.stack == stack]


def read_by_names(model: Any, folder: Path, stack: str, heads: int | None = None) -> list[AttentionWeights]:
    """The same from its tensors alone."""
    model.save_pretrained(folder)
    (folder / "config.json").unlink()
    return [weights for weights in open_checkpoint(folder, heads=heads).layers() if weights.stack == stack]


def assert_same(weights: AttentionWeights, family: Family, model: Any, seen: Seen) -> None:
    """Pattern and output from the weights alone are what the model gave."""
    bias = family.bias(model, weights.layer) if family.bias else None
    sinks = family.sinks(model, weights.layer) if family.sinks else None
    attended = attend(weights, seen.residual, source=seen.source, score_bias=bias, sinks=sinks)
    torch.testing.assert_close(attended.pattern, seen.pattern.double(), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(attended.output, seen.output.double(), rtol=TOLERANCE, atol=TOLERANCE)


def prove(family: Family, folder: Path) -> None:
    """Build, save, read, and compare every layer."""
    model = build(family)
    extracted = read(model, folder, family.stack)
    assert [weights.layer for weights in extracted] == list(family.layers)
    seen = run(family, model)
    for weights in extracted:
        assert_same(weights, family, model, seen[weights.layer])
