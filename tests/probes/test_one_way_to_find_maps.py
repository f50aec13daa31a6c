"""What a probe finds in a model is what `explain` finds: the same layers, in the same order, with the same maps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import AttentionModel, load_model
from qkov.analyses.dynamics import Parameterization, SingleLayerAttention
from qkov.circuits import CallError
from qkov.probes import AttentionProbe

from ..analyses.test_transformer_lens_models import bridge
from ..analyses.tiny_models import CAUSAL, MASK, TINY, VOCABULARY, Tiny, small
from ..analyses.torch_models import CausalTorchForCausalLM, TorchEncoder
from .test_attention_probe_sources import neo

IDS = torch.randint(8, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(1))
SHOWN = torch.ones_like(IDS, dtype=torch.bool)


@dataclass(frozen=True)
class Architecture:
    """A small model, and its kind where its class does not say it."""

    name: str
    build: Callable[[], Any]
    kind: Any = None


def built(name: str, config: Any) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, name)(config()).eval()

    return build


def jamba() -> Any:
    options = {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2}
    return small("JambaConfig", num_key_value_heads=2, num_experts=2, attn_layer_offset=1, **options)


def bart() -> Any:
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    return small("BartConfig", d_model=48, **sides, encoder_ffn_dim=64, decoder_ffn_dim=64)


def xlm() -> Any:
    return transformers.XLMConfig(emb_dim=48, n_heads=4, n_layers=2, vocab_size=VOCABULARY)


OTHERS = {
    "GPTNeoForCausalLM": neo,
    "JambaForCausalLM": jamba,
    "BartForCausalLM": bart,
    "XLMForSequenceClassification": xlm,
    "Qwen3ForCausalLM": lambda: small("Qwen3Config", num_key_value_heads=2, head_dim=12),
    "ElectraForSequenceClassification": lambda: small("ElectraConfig", embedding_size=48),
}
ACCEPTED = [
    *(Architecture(tiny.name, tiny.build) for tiny in TINY),
    *(Architecture(name, built(name, config)) for name, config in OTHERS.items()),
    Architecture("torch, first token", lambda: TorchEncoder(3, read="first").eval(), "classifier"),
    Architecture("torch, last token", lambda: TorchEncoder(3, read="last").eval(), "classifier"),
    Architecture("torch, causal", lambda: CausalTorchForCausalLM().eval()),
]


def demand_the_same(model: Any, adapted: AttentionModel) -> None:
    """Compare what a probe sees in the user's call with what the measures read in theirs."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    with torch.no_grad(), AttentionProbe(model, maps="all", measures=[]) as probe:
        model(IDS)
    seen = probe.table()[["layer"]].drop_duplicates()["layer"].tolist()
    read: list[torch.Tensor] = []
    with torch.no_grad():
        adapted.logits(IDS, SHOWN, maps=lambda layer, attention: read.insert(layer, attention))
    assert len(read) == adapted.layers
    assert [layer for _, layer in adapted.layer_keys] == seen
    assert {stack for stack, _ in adapted.layer_keys} == {""}
    for (_, layer), attention in zip(adapted.layer_keys, read, strict=True):
        assert attention.shape[1] == adapted.heads
        for head in range(adapted.heads):
            torch.testing.assert_close(probe.maps[layer, head][0], attention[:, head], rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ACCEPTED, ids=lambda architecture: architecture.name)
def test_the_layers_and_the_maps_are_the_same(architecture):
    model = architecture.build()
    demand_the_same(model, load_model(model, architecture.kind, mask_token=MASK))


def test_the_layers_and_the_maps_of_a_bridge_are_the_same(tmp_path):
    model = bridge(CAUSAL[0].build(), tmp_path)
    demand_the_same(model, load_model(model))


def t5() -> Any:
    return transformers.T5Config(d_model=48, d_kv=12, num_heads=4, num_layers=2, d_ff=64, vocab_size=VOCABULARY)


def funnel() -> Any:
    sizes = {"d_model": 48, "n_head": 4, "d_head": 12, "d_inner": 64, "block_sizes": [1, 2], "num_decoder_layers": 1}
    return transformers.FunnelConfig(vocab_size=VOCABULARY, **sizes)


STACKS = "has an encoder and a decoder, so its attention maps are of three kinds and no single row"
REFUSED = [
    (Architecture("T5ForConditionalGeneration", built("T5ForConditionalGeneration", t5), "causal"), STACKS),
    (Architecture("BartForSequenceClassification", built("BartForSequenceClassification", bart)), STACKS),
    (
        Architecture("FunnelForSequenceClassification", built("FunnelForSequenceClassification", funnel)),
        "attends from 3 queries to 5 keys in a sequence of 5 tokens, so no row of its map belongs to each token",
    ),
    (
        Architecture("BertModel", built("BertModel", lambda: small("BertConfig"))),
        r"nothing shows whether BertModel classifies or predicts tokens \(class: BertModel\); give its kind",
    ),
    (
        Architecture("MultiheadAttention", lambda: torch.nn.MultiheadAttention(8, 2), "classifier"),
        r"the forward of MultiheadAttention takes other arguments than token ids \(query, key, value\)",
    ),
    (
        Architecture("SingleLayerAttention", lambda: SingleLayerAttention(4, 2, Parameterization.CACO)),
        r"needs the vectors of its tokens: SingleLayerModel\(model, embedding\)",
    ),
]


@pytest.mark.parametrize(("architecture", "reason"), REFUSED, ids=[refused.name for refused, _ in REFUSED])
def test_what_a_probe_accepts_and_explain_does_not_is_refused_with_the_reason(architecture, reason):
    model = architecture.build()
    with pytest.raises(CallError, match=reason) as caught:
        load_model(model, architecture.kind)
    assert "\n" not in str(caught.value)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    AttentionProbe(model)


def test_a_probe_sees_every_layer_of_a_funnel():
    model = Tiny("FunnelForSequenceClassification", funnel, "").build()
    model.set_attn_implementation("eager")
    with torch.no_grad(), AttentionProbe(model, measures=["entropy"]) as probe:
        model(IDS)
    assert probe.table()["layer"].unique().tolist() == [0, 1, 2]
