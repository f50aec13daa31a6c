"""A probe on models whose attention is fused: the figures of eager attention, and outputs that stay the same."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.attention.kernels import scores
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import flash_attention_mask

from ..analyses.tiny_models import gpt2, small
from .fused_models import NanoGPT
from .kernels import Recorded, flash_stand_in, plain, plain_attention
from .plain_measures import assert_table, plain_measures

IDS = torch.randint(8, 50, (3, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([9, 6, 3])[:, None]
RIGHT = torch.arange(9) < LENGTHS
LEFT = RIGHT.flip(1)
NONE = torch.ones(3, 9, dtype=torch.bool)
RELEVANT = torch.arange(9) % 3 == 1
BY_KEY = {"num_key_value_heads": 2, "head_dim": 12}

DECODERS: dict[str, Any] = {
    "GPT2LMHeadModel": gpt2,
    "LlamaForCausalLM": lambda: small("LlamaConfig", **BY_KEY),
    "MistralForCausalLM": lambda: small("MistralConfig", sliding_window=4, **BY_KEY),
    "Qwen3ForCausalLM": lambda: small("Qwen3Config", **BY_KEY),
    "Gemma3ForCausalLM": lambda: small("Gemma3TextConfig", sliding_window=4, **BY_KEY),
    "FalconForCausalLM": lambda: small("FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "rope_parameters": None}
FLASH: dict[str, Any] = {
    "LlamaForCausalLM": DECODERS["LlamaForCausalLM"],
    "MistralForCausalLM": DECODERS["MistralForCausalLM"],
    "Gemma2ForCausalLM": lambda: small(
        "Gemma2Config", sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=4, **BY_KEY
    ),
    "GptOssForCausalLM": lambda: small("GptOssConfig", **SINKS, **BY_KEY),
    "BertForMaskedLM": lambda: small("BertConfig"),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one or a few queries."""
    monkeypatch.setattr(scores, "_BLOCK", 300)


def build(name: str, config: Any, kind: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return using(model.eval().to(dtype), kind)


def using(model: Any, kind: str) -> Any:
    """The model with a kernel; transformers itself refuses those that are not installed."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = kind
    return model


def eager_maps(model: Any, **call: Any) -> Any:
    eager = using(copy.deepcopy(model), "eager")
    with torch.no_grad():
        return eager(**call, output_attentions=True)


@pytest.mark.parametrize("mask", [NONE, LEFT, RIGHT], ids=["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_sdpa_has_the_figures_of_eager_attention_and_the_same_outputs(name, mask):
    model = build(name, DECODERS[name]())
    call: dict[str, Any] = {"input_ids": IDS, "attention_mask": mask.long()}
    with torch.no_grad():
        outside = model(**call).logits
        with AttentionProbe(model, relevant=RELEVANT, maps=[(1, 2)]) as probe:
            inside = model(**call).logits
    assert torch.equal(inside, outside)
    # Rounding of scores of up to 10 in float32, in two orders, changes a weight by up to 1e-5 of itself.
    maps = list(eager_maps(model, **call).attentions)
    window = {0: None} if name.startswith("Gemma3") else {}
    wanted = plain_measures(maps, mask, RELEVANT.expand(3, 9))
    if "Mistral" in name or window:
        # The chance depends on the window, which the test of chances below has.
        wanted = {measure: values for measure, values in wanted.items() if not measure.startswith("chance")}
    assert_table(probe.table(), wanted, tolerance=1e-5)
    kept = plain(probe.maps[1, 2][0])
    np.testing.assert_allclose(kept[mask], plain(maps[1][:, 2])[mask], atol=1e-5)
    eager = using(copy.deepcopy(model), "eager")
    with torch.no_grad(), AttentionProbe(eager, relevant=RELEVANT) as other:
        eager(**call)
    for column in ("chance", "chance_at_readout"):
        np.testing.assert_allclose(probe.table()[column], other.table()[column], atol=1e-5)
    for column in ("readout", "relevant", "chance", "rollout", "attention"):
        np.testing.assert_allclose(probe.examples()[column], other.examples()[column], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DECODERS)
def test_weights_and_largest_scores_are_those_of_what_the_kernel_got(name, dtype):
    model = build(name, DECODERS[name](), dtype=dtype)
    with torch.no_grad(), Recorded() as recorded:
        model(IDS, attention_mask=LEFT.long())
    with torch.no_grad(), AttentionProbe(model, maps="all") as probe:
        model(IDS, attention_mask=LEFT.long())
    for layer, (got, output) in enumerate(recorded.calls):
        query, key, mask = got["query"], got["key"], got.get("attn_mask")
        visible, added = np.ones((1, 1, 9, 9), dtype=bool), 0.0
        if mask is not None and mask.dtype == torch.bool:
            visible = mask.numpy()
        elif mask is not None:
            visible, added = plain(mask) > -1e4, plain(mask)
        scale = got.get("scale") or query.shape[-1] ** -0.5
        weights, products = plain_attention(query, key, scale, visible, added=np.where(visible, added, 0.0))
        for head in range(4):
            kept = plain(probe.maps[layer, head][0])
            np.testing.assert_allclose(kept[LEFT], weights[:, head][LEFT], rtol=2e-5, atol=1e-6)
            # What torch's kernel returned is the weighted sum of its values.
            value = plain(got["value"])[:, head // (4 // got["value"].shape[1])]
            tolerance = 1e-5 if dtype == torch.float32 else 0.02 * np.abs(value).max()
            np.testing.assert_allclose((kept @ value)[LEFT], plain(output)[:, head][LEFT], atol=tolerance)
        pairs = visible & LEFT[:, None, :, None].numpy() & LEFT[:, None, None].numpy()
        largest = np.where(pairs, products, -np.inf).max(axis=(0, 2, 3))
        table = probe.table()
        np.testing.assert_allclose(table.loc[table["layer"] == layer, "max_logit"], largest, rtol=2e-6)


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
def test_bert_with_padding(mask):
    model = build("BertForMaskedLM", small("BertConfig"))
    call: dict[str, Any] = {"input_ids": IDS, "attention_mask": mask.long()}
    with torch.no_grad():
        outside = model(**call).logits
        with AttentionProbe(model, relevant=RELEVANT) as probe:
            assert torch.equal(model(**call).logits, outside)
    maps = list(eager_maps(model, **call).attentions)
    assert_table(probe.table(), plain_measures(maps, mask, RELEVANT.expand(3, 9), causal=False), tolerance=1e-5)


def test_eager_attention_in_half_precision_agrees_within_its_rounding():
    model = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"](), dtype=torch.bfloat16)
    maps = [attention.float() for attention in eager_maps(model, input_ids=IDS).attentions]
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        model(IDS)
    # Eager attention rounds scores of size s to s / 256.
    largest = probe.table()["max_logit"].abs().max()
    assert_table(probe.table(), plain_measures(maps, NONE, RELEVANT.expand(3, 9)), tolerance=0.02 * largest)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_encoders_decoders_and_the_attention_between_them(name):
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = small("BartConfig", d_model=48, **sides, encoder_ffn_dim=64, decoder_ffn_dim=64)
    if name.startswith("T5"):
        config = small("T5Config", d_model=48, d_kv=12, num_heads=4, num_layers=2, d_ff=64, decoder_start_token_id=0)
    model = build(name, config)
    call: dict[str, Any] = {"input_ids": IDS, "attention_mask": RIGHT.long(), "decoder_input_ids": IDS[:, :5]}
    with torch.no_grad():
        outside = model(**call).logits
        with AttentionProbe(model, relevant=RELEVANT) as probe:
            assert torch.equal(model(**call).logits, outside)
    eager = using(copy.deepcopy(model), "eager")
    with torch.no_grad(), AttentionProbe(eager, relevant=RELEVANT) as other:
        eager(**call)
    table, wanted = probe.table(), other.table()
    assert list(table["stack"].unique()) == ["encoder", "decoder", "decoder cross"]
    for column in wanted.columns.drop("stack"):
        np.testing.assert_allclose(table[column].astype(float), wanted[column].astype(float), atol=1e-5, err_msg=column)


def test_a_vision_model():
    sizes = {"image_size": 8, "patch_size": 2, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = build("ViTModel", transformers.ViTConfig(**sizes, intermediate_size=64))
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        outside = model(image).last_hidden_state
        with AttentionProbe(model, relevant=torch.arange(17) == 3) as probe:
            assert torch.equal(model(image).last_hidden_state, outside)
    maps = list(eager_maps(model, pixel_values=image).attentions)
    everything = torch.ones(2, 17, dtype=torch.bool)
    relevant = (torch.arange(17) == 3).expand(2, 17)
    assert_table(probe.table(), plain_measures(maps, everything, relevant, causal=False), tolerance=3e-6)


@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_cached_keys(name):
    model = build(name, DECODERS[name]())
    settings: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    outside = model.generate(IDS, **settings)
    with AttentionProbe(model, measures=["entropy", "largest"]) as probe:
        assert torch.equal(model.generate(IDS, **settings), outside)
    eager = using(copy.deepcopy(model), "eager")
    with AttentionProbe(eager, measures=["entropy", "largest"]) as other:
        assert torch.equal(eager.generate(IDS, **settings), outside)
    for column in ("queries", "entropy", "largest"):
        np.testing.assert_allclose(probe.table()[column], other.table()[column], atol=2e-6, err_msg=column)


@pytest.mark.parametrize("mask", [NONE, LEFT, RIGHT], ids=["none", "left", "right"])
@pytest.mark.parametrize("name", FLASH)
def test_flash_kernels_under_transformers(name, mask, monkeypatch):
    kind = "flash_attention_3"
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, kind, flash_stand_in)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, kind, flash_attention_mask)
    model = build(name, FLASH[name](), kind)
    call: dict[str, Any] = {"input_ids": IDS, "attention_mask": mask.long()}
    with torch.no_grad():
        outside = model(**call).logits
        with AttentionProbe(model, relevant=RELEVANT, maps="all") as probe:
            assert torch.equal(model(**call).logits, outside)
    maps = eager_maps(model, **call).attentions
    for layer, attention in enumerate(maps):
        for head in range(4):
            kept = plain(probe.maps[layer, head][0])
            np.testing.assert_allclose(kept[mask], plain(attention[:, head])[mask], atol=1e-5)
    assert probe.table()["max_logit"].notna().all()
    assert transformers.AttentionInterface()[kind] is flash_stand_in


def test_packed_sequences_of_a_flash_kernel_do_not_see_each_other(monkeypatch):
    kind = "flash_attention_3"
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, kind, flash_stand_in)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, kind, flash_attention_mask)
    model = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"](), kind)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    with torch.no_grad(), AttentionProbe(model, maps="all", measures=["entropy"]) as probe:
        model(IDS[:1], position_ids=positions, **packed)
    for first, last in ((0, 4), (4, 9)):
        alone = eager_maps(model, input_ids=IDS[:1, first:last]).attentions
        for layer, head in ((0, 0), (1, 3)):
            kept = probe.maps[layer, head][0][0, first:last]
            assert kept[:, :first].abs().max() == 0 if first else kept[:, last:].abs().max() == 0
            np.testing.assert_allclose(plain(kept[:, first:last]), plain(alone[layer][0, head]), atol=2e-6)
    across = packed | {"cu_seq_lens_k": torch.tensor([0, 5, 9], dtype=torch.int32)}
    with (
        torch.no_grad(),
        AttentionProbe(model),
        pytest.raises(CallError, match=r"layer 0 of Llama.*packed sequences have other bounds"),
    ):
        model(IDS[:1], position_ids=positions, **across)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_flex_attention():
    torch.compiler.set_stance("force_eager")
    try:
        model = build("Gemma2ForCausalLM", FLASH["Gemma2ForCausalLM"](), "flex_attention")
        call: dict[str, Any] = {"input_ids": IDS, "attention_mask": LEFT.long()}
        with torch.no_grad():
            outside = model(**call).logits
            with AttentionProbe(model, relevant=RELEVANT) as probe:
                assert torch.equal(model(**call).logits, outside)
    finally:
        torch.compiler.set_stance("default")
    maps = list(eager_maps(model, **call).attentions)
    wanted = plain_measures(maps, LEFT, RELEVANT.expand(3, 9))
    assert_table(probe.table(), {name: wanted[name] for name in ("entropy", "largest", "relevant", "self")}, 3e-6)


class Vision(nn.Module):
    """A layer with timm's form: one projection, and torch's kernel without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, rate: float = 0.0, is_flat: bool = False) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, 6).permute(2, 0, 3, 1, 4)
        if is_flat:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        x = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.proj(x.reshape(batch, 4, length, 6).transpose(1, 2).reshape(batch, length, width))


def test_a_user_s_own_modules_with_torch_s_kernel():
    torch.manual_seed(0)
    model, ids = NanoGPT(), torch.randint(0, 30, (3, 10))
    relevant = torch.arange(10) % 3 == 1
    with torch.no_grad():
        outside = model(ids)
        with AttentionProbe(model, relevant=relevant) as probe:
            assert torch.equal(model(ids), outside)
        with Recorded() as recorded:
            model(ids)
    causal = np.tril(np.ones((10, 10), dtype=bool))
    both = [plain_attention(got[0]["query"], got[0]["key"], 6**-0.5, causal) for got in recorded.calls]
    maps = [torch.from_numpy(weights) for weights, _ in both]
    mask = torch.ones(3, 10, dtype=torch.bool)
    assert_table(probe.table(), plain_measures(maps, mask, relevant.expand(3, 10)), tolerance=2e-6)
    largest = np.concatenate([np.where(causal, products, -np.inf).max(axis=(0, 2, 3)) for _, products in both])
    np.testing.assert_allclose(probe.table()["max_logit"], largest, rtol=1e-5)


class SinglePrecision(nn.Module):
    """A layer that gives torch's kernel queries and keys in float32, whatever autocast makes of its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(24, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).float().reshape(*x.shape[:2], 2, 4, 6).permute(2, 0, 3, 1, 4) * 1.001
        return functional.scaled_dot_product_attention(q, k, k)


def test_the_kernel_s_own_precision_under_autocast():
    torch.manual_seed(0)
    layer, x = SinglePrecision(), 3 * torch.randn(2, 7, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with Recorded() as recorded:
            outside = layer(x)
        with AttentionProbe(layer, maps="all") as probe:
            assert torch.equal(layer(x), outside)
    got = recorded.calls[0][0]
    assert got["query"].dtype == torch.float32
    assert outside.dtype == torch.bfloat16
    visible = np.ones((7, 7), dtype=bool)
    weights, _ = plain_attention(got["query"].bfloat16(), got["key"].bfloat16(), 6**-0.5, visible)
    others, _ = plain_attention(got["query"], got["key"], 6**-0.5, visible)
    kept = np.stack([plain(probe.maps[0, head][0]) for head in range(4)], axis=1)
    np.testing.assert_allclose(kept, weights, atol=1e-6)
    assert np.abs(others - weights).max() > 1e-4


def test_dropout_of_a_kernel_is_not_in_the_figures_and_leaves_random_numbers_alone():
    torch.manual_seed(0)
    layer, x = Vision(), torch.randn(2, 7, 24)
    with AttentionProbe(layer) as without:
        layer.eval()(x)
    torch.manual_seed(1)
    outside = layer(x, 0.5)
    torch.manual_seed(1)
    with AttentionProbe(layer) as probe:
        assert torch.equal(layer(x, 0.5), outside)
    np.testing.assert_array_equal(probe.table()["entropy"], without.table()["entropy"])
    assert set(probe.table()["mode"]) == {"training, before dropout of 0.5"}
    assert "mode" not in without.table()


def test_what_is_not_known_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash_stand_in)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "flash_attention_2", flash_attention_mask)
    layer, x = Vision().eval(), torch.randn(2, 7, 24)
    with AttentionProbe(layer), pytest.raises(CallError, match=r"queries of shape \[8, 7, 6\]; expected \[batch, head"):
        layer(x, is_flat=True)
    model = build("GptOssForCausalLM", FLASH["GptOssForCausalLM"](), "flash_attention_2")
    with AttentionProbe(model), pytest.raises(CallError, match="flash_attention_2 has no sinks"):
        model(IDS)
    paged = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"](), "paged|eager")
    with AttentionProbe(paged), pytest.raises(CallError, match="blocks of a paged cache"):
        paged(IDS)


def test_the_largest_score_of_several_calls_is_the_largest_of_theirs():
    model = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"]())
    largest, together = [], AttentionProbe(model, queries="last")
    with torch.no_grad():
        for ids in (IDS[:1], IDS[1:2], IDS[2:]):
            with AttentionProbe(model, queries="last") as alone, together:
                model(ids)
            largest.append(alone.table()["max_logit"].to_numpy())
    assert np.isfinite(largest).all()
    assert len(set(np.argmax(largest, axis=0))) > 1
    np.testing.assert_allclose(together.table()["max_logit"], np.max(largest, axis=0), rtol=1e-12)


def test_without_a_query_there_is_no_largest_score():
    model = build("GPT2LMHeadModel", gpt2())
    with torch.no_grad(), AttentionProbe(model, queries=torch.zeros(9)) as probe:
        model(IDS)
    assert probe.table()["max_logit"].isna().all()
    assert set(probe.table()["queries"]) == {0}


def test_the_largest_score_is_not_known_of_a_map():
    model = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"](), "eager")
    with AttentionProbe(model, measures=["max_logit", "entropy"]) as probe:
        model(IDS)
    table = probe.table()
    assert table["max_logit"].isna().all()
    assert table["finite"].all()
    assert all("max_logit: the layer gave its map" in reason for reason in table["unknown"])
    with AttentionProbe(model) as default:
        model(IDS)
    assert "max_logit" not in default.table()


def test_functions_that_are_registered_meanwhile_are_the_ones_that_run():
    model = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"]())
    registry = transformers.AttentionInterface._global_mapping
    own = registry["sdpa"]
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    with torch.no_grad():
        with AttentionProbe(model) as before:
            model(IDS)
        try:
            with AttentionProbe(model) as probe:
                transformers.AttentionInterface.register("sdpa", counting)
                model(IDS)
        finally:
            registry["sdpa"] = own
    assert len(calls) == 2
    np.testing.assert_array_equal(probe.table()["entropy"], before.table()["entropy"])


def test_two_probes_and_another_model_that_nobody_watches():
    model = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"]())
    other = build("LlamaForCausalLM", DECODERS["LlamaForCausalLM"]())
    with torch.no_grad(), AttentionProbe(model) as outer:
        with AttentionProbe(model) as inner:
            model(IDS)
            other(IDS)
        model(IDS)
    assert set(inner.table()["queries"]) == {27}
    assert set(outer.table()["queries"]) == {54}
    np.testing.assert_allclose(inner.table()["entropy"], outer.table()["entropy"], rtol=1e-12)
