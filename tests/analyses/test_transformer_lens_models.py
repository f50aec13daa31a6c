"""Models with TransformerLens' hooks as the measures see them: its cached patterns, and the model of transformers."""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import predictions
from qkov.analyses.attention.models.transformer_lens import HookedModel
from qkov.analyses.attention.models.transformers import TransformersCausalLM
from qkov.analyses.tasks import Example
from qkov.circuits import CallError, QkovError
from tokenizers import Tokenizer, models
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from .tiny_models import CAUSAL, VOCABULARY, Tiny, small

assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
NAMES = ("GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM")
CHOSEN = [tiny for tiny in CAUSAL if tiny.name in NAMES]


def bridge(model: Any, folder: Any) -> Any:
    """Boot offline from saved files; the model becomes part of the bridge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
        return TransformerBridge.boot_transformers(str(folder), hf_model=model, device="cpu").eval()


@pytest.fixture(params=CHOSEN, ids=lambda tiny: tiny.name)
def tiny(request) -> Tiny:
    return request.param


@pytest.fixture
def hooked(tiny, tmp_path) -> HookedModel:
    return HookedModel(bridge(tiny.build(), tmp_path))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(8, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]
    return torch.where(mask, tokens, 0), mask


def test_logits_and_maps_are_the_model_s_own_whatever_they_are_batched_with(tiny, hooked):
    tokens, mask = batch()
    maps: list[tuple[int, torch.Tensor]] = []
    with torch.no_grad():
        logits = hooked.logits(tokens, mask, maps=lambda layer, given: maps.append((layer, given)))
    assert [layer for layer, _ in maps] == [0, 1]
    assert (hooked.layers, hooked.heads, hooked.context) == (2, 4, 32)
    own = TransformersCausalLM(tiny.build())
    for row, length in enumerate((9, 6, 3)):
        alone, shown = tokens[row : row + 1, :length], torch.ones(1, length, dtype=torch.bool)
        patterns: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            wanted = own.logits(alone, shown, maps=patterns.__setitem__)
            _, cache = hooked._model.run_with_cache(alone)
        assert_same(logits[row, :length], wanted[0])
        for layer, given in maps:
            assert_same(given[row, :, :length, :length], patterns[layer][0])
            assert_same(given[row, :, :length, :length], cache[f"blocks.{layer}.attn.hook_pattern"][0])


def test_inputs_are_what_the_values_read(hooked):
    tokens, mask = batch()
    given: list[torch.Tensor] = []
    with torch.no_grad():
        hooked.logits(tokens, mask, inputs=lambda _layer, value: given.append(value))
        _, cache = hooked._model.run_with_cache(tokens, attention_mask=mask.long())
    for layer, value in enumerate(given):
        assert_same(value, cache[f"blocks.{layer}.attn.v.hook_in"])
        W_V, b_V = (getattr(hooked.attention_weights()[layer], name) for name in ("W_V", "b_V"))
        made = torch.einsum("bpd,hde->bphe", value, W_V) + (0 if b_V is None else b_V)
        assert_same(made.flatten(2), cache[f"blocks.{layer}.attn.v.hook_out"].flatten(2))
    assert not any(block.attn._forward_pre_hooks for block in hooked._model.blocks)


def test_embeddings_in_place_of_tokens_give_the_same_and_gradients_reach_maps(hooked):
    tokens, mask = batch()
    maps: list[torch.Tensor] = []
    embedded = hooked.embed(tokens).detach().requires_grad_()
    logits = hooked.logits(tokens, mask, embedded=embedded, maps=lambda _layer, given: maps.append(given))
    assert_same(logits[mask], hooked.logits(tokens, mask)[mask])
    last = hooked.readout(mask)
    total = logits[torch.arange(3), last, 0].sum()
    first, top = torch.autograd.grad(total, maps, retain_graph=True)
    assert first.any()
    rows = top.abs().sum(dim=(1, 3)) > 0
    assert torch.equal(rows, torch.nn.functional.one_hot(last, 9).bool())
    assert torch.autograd.grad(total, embedded)[0][mask].any()
    changed = hooked.logits(tokens, mask, embedded=embedded.detach() + torch.randn(embedded.shape))
    assert not torch.allclose(changed[mask], logits[mask], atol=1e-2)


def test_predictions_are_those_of_the_model_inside(tiny, hooked):
    examples = [
        Example(tokens=(9, 10, 11), continuations=((20, 21), (30,))),
        Example(tokens=(12, 13, 14, 15, 16), continuations=((20,), (21,))),
    ]
    wanted = predictions(TransformersCausalLM(tiny.build()), examples)
    for one, other in zip(predictions(hooked, examples), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_model_of_transformer_lens_own_is_taken_too():
    cfg = TransformerBridgeConfig(
        d_model=24,
        d_head=8,
        n_heads=3,
        n_layers=2,
        n_ctx=16,
        d_vocab=20,
        act_fn="gelu",
        architecture="TransformerLensNative",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge_class: Any = TransformerBridge
        model = bridge_class.boot_native(cfg)
    hooked = HookedModel(model)
    tokens, mask = torch.randint(0, 20, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    maps: list[torch.Tensor] = []
    hooked.logits(tokens, mask, maps=lambda _layer, given: maps.append(given))
    _, cache = model.run_with_cache(tokens)
    for layer, given in enumerate(maps):
        assert_same(given, cache[f"blocks.{layer}.attn.hook_pattern"])
    assert (hooked.layers, hooked.heads) == (2, 3)


def test_models_in_both_directions_and_what_is_no_model_are_refused(tmp_path):
    torch.manual_seed(0)
    model = bridge(transformers.BertForMaskedLM(small("BertConfig")), tmp_path)
    with pytest.raises(CallError, match="sees those after it, and only causal language models"):
        HookedModel(model)
    with pytest.raises(
        CallError, match="expected a model with cfg, blocks and hooks as in TransformerLens, got Simple"
    ):
        HookedModel(SimpleNamespace(cfg=None))


def test_sequences_longer_than_the_context_and_hooks_that_do_not_fire_are_refused(hooked, monkeypatch):
    with pytest.raises(CallError, match="takes at most 32 tokens, got 33"):
        hooked.logits(torch.full((1, 33), 9), torch.ones(1, 33, dtype=torch.bool))
    for block in hooked._model.blocks:
        monkeypatch.setitem(vars(block.attn), "hook_pattern", lambda value: value)
    with pytest.raises(QkovError, match=r"one attention map from each of the 2 layers of .* in order, got none"):
        hooked.logits(*batch(), maps=lambda _layer, _given: None)
    with pytest.raises(CallError, match=r"gives no attention maps \[batch, head, query, key\]"):
        HookedModel(hooked._model)


def test_the_mode_is_as_it_was_after_every_call(hooked):
    model = hooked._model.train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    seen: list[bool] = []
    hooked.logits(*batch(), maps=lambda _layer, _map: seen.append(model.training))
    hooked.embed(batch()[0])
    assert seen == [False, False]
    assert [module.training for module in model.modules()] == before
