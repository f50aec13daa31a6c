"""Models with torch.nn.MultiheadAttention as the measures use them: their own logits, and maps that gradients reach."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from qkov.analyses.attention import Batch, gradient_rollout, load_model, value_norms
from qkov.analyses.tasks import Example
from qkov.circuits import CallError
from torch import Tensor, nn

from .torch_models import HEADS, VOCABULARY, WIDTH, CausalTorchForCausalLM, TorchEncoder

assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
LENGTHS = (9, 6, 3)
TOKENS = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(9) < torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize("read", ["first", "last", "all"])
def test_logits_are_the_model_s_own_and_maps_are_softmax_rows_over_the_tokens(read):
    model = TorchEncoder(VOCABULARY if read == "all" else 3, read=read, dropout=0.2).train()
    adapted = load_model(model, "causal" if read == "all" else "classifier")
    maps: list[Tensor] = []
    found = adapted.logits(TOKENS, MASK, maps=lambda _layer, attention: maps.append(attention))
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        wanted = model.eval()(TOKENS, key_padding_mask=~MASK)
    assert_same(found[MASK] if read == "all" else found, wanted[MASK] if read == "all" else wanted)
    assert (adapted.layers, adapted.heads, adapted.causal) == (2, HEADS, read != "first")
    for attention in maps:
        assert_same(attention.sum(dim=-1)[MASK[:, None].expand(-1, HEADS, -1)], torch.ones(sum(LENGTHS) * HEADS))
        assert not attention.transpose(1, 3)[~MASK].any()
    assert adapted.readout(MASK).tolist() == ([0, 0, 0] if read == "first" else [8, 5, 2])
    embedded = adapted.embed(TOKENS)
    again = adapted.logits(TOKENS, MASK, embedded=embedded)
    assert_same(again[MASK] if read == "all" else again, found[MASK] if read == "all" else found)


def test_gradients_reach_the_maps_and_agree_with_differences():
    model: Any = TorchEncoder(3, read="first").double()
    adapted = load_model(model, "classifier")
    maps: list[Tensor] = []
    logits = adapted.logits(TOKENS, MASK, maps=lambda _layer, attention: maps.append(attention))
    first, last = torch.autograd.grad(logits[0, 1], maps)
    assert first.any()
    assert (last.abs().sum(dim=(1, 3)) > 0).nonzero().tolist() == [[0, 0]]
    # The first layer's map decides the second's; the last layer's enters linearly through its values.
    change = torch.zeros_like(maps[1])
    change[0, 2, 0, 4] = 1e-6
    module = model.encoder.layers[1].self_attn
    values = nn.functional.linear(read_by(adapted)[1], module.in_proj_weight[2 * WIDTH :], module.in_proj_bias[48:])
    written = torch.zeros(3, HEADS, 9, WIDTH // HEADS, dtype=torch.float64) + change @ values.unflatten(
        -1, (HEADS, -1)
    ).transpose(1, 2)
    shift = nn.functional.linear(written.transpose(1, 2).flatten(2), module.out_proj.weight)
    handle = module.register_forward_hook(lambda _module, _args, output: (output[0] + shift, *output[1:]))
    moved = adapted.logits(TOKENS, MASK)
    handle.remove()
    assert float((moved - logits).detach()[0, 1] / 1e-6) == pytest.approx(float(last[0, 2, 0, 4]), rel=1e-4)


def read_by(adapted) -> list[Tensor]:
    read: list[Tensor] = []
    adapted.logits(TOKENS, MASK, inputs=lambda _layer, value: read.append(value))
    return read


def test_maps_are_handed_on_and_not_kept():
    adapted = load_model(TorchEncoder(3, read="first"), "classifier")
    alive: list[weakref.ref] = []

    def watch(_layer: int, attention: Tensor) -> None:
        assert all(earlier() is None for earlier in alive)
        alive.append(weakref.ref(attention))

    with torch.no_grad():
        adapted.logits(TOKENS, MASK, maps=watch)
    assert [reference() for reference in alive] == [None, None]


VARIANTS = [
    {"batch_first": False},
    {"batch_first": True, "bias": False},
    {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True},
    {"batch_first": True, "kdim": WIDTH, "vdim": WIDTH},
    {"batch_first": True, "add_zero_attn": True},
]


class Variant(nn.Module):
    """One attention with the options that torch offers."""

    def __init__(self, options: dict[str, bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        padding = None if attention_mask is None else ~attention_mask
        attended = x + self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return self.head(attended[:, 0] if self.attention.batch_first else attended[0])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_output_computed_from_the_map_is_the_module_s_own(options):
    model = Variant(options).eval()
    adapted = load_model(model, "classifier")
    maps: list[Tensor] = []
    found = adapted.logits(TOKENS, MASK, maps=lambda _layer, attention: maps.append(attention))
    assert_same(found, model(TOKENS, MASK))
    assert maps[0].shape == (3, HEADS, 9, 9)
    assert torch.autograd.grad(found.sum(), maps)[0].any()


def test_measures_run_on_a_model_of_torch():
    adapted = load_model(CausalTorchForCausalLM(), "causal")
    batch = Batch.of([Example(tokens=tuple(row)) for row in TOKENS.tolist()], adapted.pad)
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(gradient_rollout(adapted, batch).sum(dim=1), ones)
    torch.testing.assert_close(value_norms(adapted, batch).sum(dim=1), ones)


class Unmasked(TorchEncoder):
    """A forward without a mask."""

    def forward(self, tokens: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(tokens)


def test_what_a_model_of_torch_lacks_is_said():
    pooled = load_model(TorchEncoder(3, read="mean"), "classifier")
    with pytest.raises(CallError, match="reads its prediction off several positions"):
        pooled.readout(MASK)
    unmasked = load_model(Unmasked(3, read="first"), "classifier")
    unmasked.logits(TOKENS, torch.ones_like(MASK))
    with pytest.raises(CallError, match=r"takes no mask .* so padding and hidden tokens would be seen"):
        unmasked.logits(TOKENS, MASK)
    with pytest.raises(CallError, match=r"nothing shows whether TorchEncoder classifies .*; give its kind"):
        load_model(TorchEncoder(3, read="first"))
    with pytest.raises(CallError, match="a token of TorchEncoder sees those after it"):
        load_model(TorchEncoder(3, read="tokens"), "causal")
    with pytest.raises(CallError, match=r"returned \[1, 5, 3\]; expected logits \[batch, class\]"):
        load_model(TorchEncoder(3, read="all"), "classifier")
    with pytest.raises(CallError, match="its kind should be classifier or causal"):
        load_model(TorchEncoder(3, read="first"), "masked")
    with pytest.raises(CallError, match="no attention was found in Linear"):
        load_model(nn.Linear(2, 2), "classifier")
