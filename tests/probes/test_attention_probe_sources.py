"""Where a probe takes maps from: models of transformers of every make, torch's own attention, and this project's."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from qkov.analyses.dynamics import Parameterization, Sequences, SingleLayerAttention
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ..analyses.tiny_models import TINY, VOCABULARY, Tiny, gpt2, small
from .plain_measures import assert_table, plain_measures

MASK = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]
IDS = torch.randint(8, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
RELEVANT = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.4


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def calls_the_kernel(call: Callable[[], Any]) -> bool:
    with patch("torch.nn.functional.scaled_dot_product_attention", wraps=scaled_dot_product_attention) as kernel:
        call()
    return kernel.called


def of_stack(table: Any, stack: str) -> Any:
    return table[table["stack"] == stack].reset_index(drop=True)


NAMES = ("DebertaV2ForSequenceClassification", "BloomForCausalLM", "AlbertForMaskedLM", "OPTForCausalLM")
SOURCES = [tiny for tiny in TINY if tiny.name in NAMES or tiny.name == "LlamaForCausalLM" or "Modern" in tiny.name]
SOURCES.append(Tiny("GPTNeoForCausalLM", lambda: neo(), ""))
SOURCES.append(
    Tiny("XLMModel", lambda: transformers.XLMConfig(emb_dim=48, n_heads=4, n_layers=2, vocab_size=50), "", False)
)


def neo() -> Any:
    layers = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 3}
    return small("GPTNeoConfig", **layers, bos_token_id=1, eos_token_id=1)


@pytest.mark.parametrize("tiny", SOURCES, ids=lambda tiny: tiny.name)
def test_models_of_transformers_are_measured_and_return_what_they_returned(tiny):
    model = tiny.build("eager")
    given = {"input_ids": IDS, "attention_mask": MASK.long()}
    with torch.no_grad():
        plain = model(**given)
        with AttentionProbe(model, relevant=RELEVANT, measures=["entropy", "sink", "previous", "relevant"]) as probe:
            probed = model(**given)
        maps = list(model(**given, output_attentions=True).attentions)
    assert list(plain) == list(probed)
    assert torch.equal(plain[0], probed[0])
    wanted = plain_measures(maps, MASK, RELEVANT, causal=tiny.causal)
    for name in ("largest", "self", "next", "no_token"):
        del wanted[name]
    if tiny.name == "GPTNeoForCausalLM":
        local = plain_measures(maps[1:], MASK, RELEVANT, window=3)
        for name in ("chance", "chance_at_readout"):
            wanted[name][1] = local[name]
    assert_table(probe.table(), wanted)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_encoder_and_decoder_are_three_stacks(name):
    torch.manual_seed(0)
    config: Any = small("T5Config", d_model=48, d_kv=12, num_heads=4, num_layers=2, d_ff=64, decoder_start_token_id=0)
    if name.startswith("Bart"):
        sides = {
            f"{side}_{what}": 2 if what == "layers" else 4
            for side in ("encoder", "decoder")
            for what in ("layers", "attention_heads")
        }
        config = small("BartConfig", d_model=48, **sides, encoder_ffn_dim=64, decoder_ffn_dim=64)
    model = eager(getattr(transformers, name)(config).eval())
    decoder_ids, decoder_mask = IDS[:, :5], MASK[:, 2:7]
    given = {
        "input_ids": IDS,
        "attention_mask": MASK.long(),
        "decoder_input_ids": decoder_ids,
        "decoder_attention_mask": decoder_mask.long(),
    }
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        output = model(**given, output_attentions=True)
    table, maps = probe.table(), {key: list(output[f"{key}_attentions"]) for key in ("encoder", "decoder", "cross")}
    assert list(table["stack"].unique()) == ["encoder", "decoder", "decoder cross"]
    assert_table(of_stack(table, "encoder"), plain_measures(maps["encoder"], MASK, RELEVANT, causal=False))
    decoder = plain_measures(maps["decoder"], decoder_mask, torch.zeros_like(decoder_mask))
    found = of_stack(table, "decoder")
    assert_table(found, {key: decoder[key] for key in ("entropy", "sink", "previous", "self", "largest")})
    assert found["relevant"].isna().all()
    cross = of_stack(table, "decoder cross")
    assert cross["self"].isna().all()
    for layer, attention in enumerate(maps["cross"]):
        for head in range(4):
            pairs = [(example, query) for example, query in decoder_mask.nonzero().tolist()]
            rows = torch.stack([attention[example, head, query].double() for example, query in pairs])
            on = torch.stack([RELEVANT[example] & MASK[example] for example, _ in pairs])
            row = cross[(cross["layer"] == layer) & (cross["head"] == head)].iloc[0]
            assert row["queries"] == len(pairs)
            assert row["entropy"] == pytest.approx(float(torch.special.entr(rows).sum(-1).mean()), abs=1e-6)
            assert row["relevant"] == pytest.approx(float((rows * on).sum(-1).mean()), abs=1e-6)
            assert row["chance"] == pytest.approx(
                float(torch.stack([on[i].sum() / MASK[example].sum() for i, (example, _) in enumerate(pairs)]).mean()),
                abs=1e-6,
            )


def test_what_stands_in_the_place_of_a_map_and_is_none_is_refused():
    settings: Any = small("LongformerConfig", attention_window=4, max_position_embeddings=64)
    model = eager(transformers.LongformerModel(settings).eval())
    with pytest.raises(CallError, match="not attention weights"), torch.no_grad(), AttentionProbe(model):
        model(IDS[:, :8])


def test_an_encoder_and_a_decoder_of_other_makes_are_told_apart():
    def composed(attention: str) -> Any:
        side: Any = small("BertConfig", attn_implementation=attention)
        other: Any = small("BertConfig", attn_implementation=attention, is_decoder=True, add_cross_attention=True)
        parts = {"encoder": transformers.BertModel(side), "decoder": transformers.BertLMHeadModel(other)}
        return transformers.EncoderDecoderModel(**parts).eval()

    # Which parts keep the kernel that they were built with differs between versions of transformers.
    fused = eager(composed("sdpa"))
    states = torch.randn(3, 9, 48)
    encoder = calls_the_kernel(lambda: fused.encoder(IDS))
    decoder = calls_the_kernel(lambda: fused.decoder(IDS[:, :4], encoder_hidden_states=states))
    assert encoder
    kernels = {"encoder": encoder, "decoder": decoder, "decoder cross": decoder}
    with torch.no_grad(), AttentionProbe(fused) as probe:
        fused(IDS, attention_mask=MASK.long(), decoder_input_ids=IDS[:, :4])
    table = probe.table()
    assert (table["max_logit"].notna() == table["stack"].map(kernels)).all()
    assert table["entropy"].notna().all()
    model = composed("eager")
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        output = model(IDS, attention_mask=MASK.long(), decoder_input_ids=IDS[:, :4], output_attentions=True)
    table = probe.table()
    assert list(table["stack"].unique()) == ["encoder", "decoder", "decoder cross"]
    maps = list(output.encoder_attentions)
    assert_table(of_stack(table, "encoder"), plain_measures(maps, MASK, RELEVANT, causal=False))
    assert set(of_stack(table, "decoder cross")["queries"]) == {12}


def test_a_decoder_alone_reads_the_padding_of_the_states_that_it_is_given():
    config: Any = small("BertConfig", attn_implementation="eager", is_decoder=True, add_cross_attention=True)
    model: Any = transformers.BertModel(config).eval()
    states, shown = torch.randn(3, 9, 48, generator=torch.Generator().manual_seed(3)), MASK.flip(1)
    given = {"encoder_hidden_states": states, "encoder_attention_mask": shown.long()}
    queries = torch.arange(4) < torch.tensor([4, 2, 3])[:, None]
    with torch.no_grad(), AttentionProbe(model) as probe:
        output = model(IDS[:, :4], attention_mask=queries.long(), **given, output_attentions=True)
    cross = of_stack(probe.table(), "cross")
    assert set(cross["queries"]) == {9}
    rows = torch.stack(list(output.cross_attentions)).double().transpose(2, 3)[:, queries]
    assert rows.shape == (2, 9, 4, 9)
    first = shown.long().argmax(dim=1)[queries.nonzero()[:, 0]]
    sink = rows[:, torch.arange(9), :, first].mean(dim=0)
    np.testing.assert_allclose(cross["sink"], sink.flatten(), atol=1e-6)
    entropy = torch.special.entr(rows).sum(dim=-1).mean(dim=1)
    np.testing.assert_allclose(cross["entropy"], entropy.flatten(), atol=1e-6)


def test_layers_have_their_own_numbers_where_some_have_no_attention():
    options = {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2}
    config: Any = small("JambaConfig", num_key_value_heads=2, num_experts=2, attn_layer_offset=1, **options)
    config._attn_implementation = "eager"
    model: Any = transformers.JambaForCausalLM(config).eval()
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        model(IDS)
    assert set(probe.table()["layer"]) == {1}
    # What the other layers carry from token to token no map tells.
    assert probe.examples()["rollout"].isna().all()


@pytest.mark.parametrize("causal", [False, True])
def test_xlm_s_config_tells_what_a_query_can_see_where_weights_are_0(causal):
    torch.manual_seed(0)
    config = transformers.XLMConfig(emb_dim=48, n_heads=4, n_layers=2, vocab_size=50, causal=causal)
    model: Any = eager(transformers.XLMModel(config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_lin" in name:
                weight.mul_(1e6)
        with AttentionProbe(model, relevant=RELEVANT) as probe:
            maps = model(IDS, attention_mask=MASK.long(), output_attentions=True).attentions
    assert (maps[0][0, :, [0, -1]] == 0).any()
    wanted = plain_measures(list(maps), MASK, RELEVANT, causal=causal)
    np.testing.assert_allclose(probe.table()["chance"], wanted["chance"].flatten(), rtol=0, atol=1e-6)


def test_a_part_of_a_model_can_be_watched_alone_and_a_model_around_another():
    model = eager(Tiny("LlamaForCausalLM", lambda: small("LlamaConfig", num_key_value_heads=2), "").build())
    with torch.no_grad(), AttentionProbe(model.model, maps={(1, 2)}) as probe:
        maps = model(IDS, output_attentions=True).attentions
    assert torch.equal(probe.maps[1, 2][0], maps[1][:, 2])

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.times = model, 1

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.inner(ids).logits.sum() for _ in range(self.times)]).sum()

    around = Around()
    with torch.no_grad(), AttentionProbe(around) as probe:
        around(IDS)
    assert set(probe.table()["queries"]) == {27}
    around.times = 2
    with pytest.raises(CallError, match="layer 0 of Around gave two maps in one call"), AttentionProbe(around):
        around(IDS)


def test_attention_that_becomes_fused_inside_the_block_is_refused_and_before_it_is_measured():
    model = eager(transformers.GPT2LMHeadModel(gpt2(attn_implementation="sdpa")).eval())
    probe = AttentionProbe(model)
    with probe:
        model.set_attn_implementation("sdpa")
        with pytest.raises(CallError, match="layer 0 of GPT2LMHeadModel gave no attention map; fused"):
            model(IDS)
    with torch.no_grad(), probe:
        model(IDS)
    assert set(probe.table()["queries"]) == {27}


@pytest.mark.filterwarnings("ignore")
def test_what_no_hook_reaches_is_refused():
    model = eager(Tiny("GPT2LMHeadModel", gpt2, "").build())
    compiled: Any = torch.compile(model, backend="eager")
    for given, message in [
        (compiled, "the model is compiled"),
        (nn.DataParallel(model), "use model.module instead"),
        (nn.Linear(2, 2), "no attention was found in Linear: expected"),
        ("gpt2", r"expected a torch\.nn\.Module whose attention can be read, got str"),
    ]:
        with pytest.raises(CallError, match=message):
            AttentionProbe(given)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    tower: Any = transformers.CLIPModel(transformers.CLIPConfig(text_config=sizes, vision_config=sizes))
    with pytest.raises(CallError, match=r"holds several stacks of attention .*give one of its parts"):
        AttentionProbe(eager(tower))


def test_calls_that_are_no_call_of_the_model_are_named():
    model = eager(Tiny("GPT2LMHeadModel", gpt2, "").build())
    with AttentionProbe(model) as probe:
        model.transformer(IDS)
    with pytest.raises(CallError, match=r"nothing was measured; .*; 2 maps came from calls of its parts alone"):
        probe.table()


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


VARIANTS = [
    ({"batch_first": True}, {}),
    ({"batch_first": False}, {"key_padding_mask": ~MASK}),
    ({"batch_first": True, "bias": False}, {"key_padding_mask": torch.zeros(3, 9).masked_fill(~MASK, -torch.inf)}),
    ({"batch_first": True, "add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": ~MASK}),
    ({"batch_first": True, "kdim": 8, "vdim": 12}, {"key_padding_mask": ~MASK}),
    ({"batch_first": True}, {"attn_mask": torch.ones(9, 9).triu(1).bool(), "is_causal": True}),
]


@pytest.mark.parametrize(("options", "given"), VARIANTS)
@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention_is_measured_whatever_it_is_called_with(options, given, training):
    module = attention(**options, dropout=0.3).train(training)
    query = torch.randn(3, 9, 16)
    key = torch.randn(3, 9, module.kdim) if module.kdim != 16 else query
    value = torch.randn(3, 9, module.vdim) if module.vdim != 16 else query
    called = [query, key, value]
    if not module.batch_first:
        turned = {id(tensor): tensor.transpose(0, 1) for tensor in called}
        called = [turned[id(tensor)] for tensor in called]
    torch.manual_seed(5)
    plain, _ = module(*called, need_weights=False, **given)
    with AttentionProbe(module, relevant=RELEVANT) as probe:
        torch.manual_seed(5)
        probed, _ = module(*called, need_weights=False, **given)
    assert torch.equal(plain, probed)
    with torch.no_grad():
        _, maps = module.eval()(*called, average_attn_weights=False, **given)
    mask = MASK if "key_padding_mask" in given else torch.ones_like(MASK)
    wanted = plain_measures([maps[..., :9]], mask, RELEVANT, causal="attn_mask" in given)
    if key is not query:
        # Of another sequence nobody says which queries are tokens, and no query is its own key.
        assert "self" not in probe.table()
        assert set(probe.table()["queries"]) == {27}
    else:
        assert_table(probe.table(), wanted)


def test_a_single_sequence_without_batch_is_measured():
    module, sequence = attention(), torch.randn(9, 16)
    with AttentionProbe(module, relevant=RELEVANT[0]) as probe:
        _, maps = module(sequence, sequence, sequence, average_attn_weights=False)
    ones = torch.ones(1, 9, dtype=torch.bool)
    assert_table(probe.table(), plain_measures([maps[None].detach()], ones, RELEVANT[:1], causal=False))


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_s_encoder_is_measured_where_it_would_take_its_fused_path():
    model: Any = encoder().eval()
    inputs = torch.randn(3, 9, 16)
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        fused = model(inputs, src_key_padding_mask=~MASK)
        with AttentionProbe(model, relevant=RELEVANT) as probe:
            probed = model(inputs, src_key_padding_mask=~MASK)
        assert torch.backends.mha.get_fastpath_enabled()
        hidden = inputs
        for layer in model.layers:
            seen.append(layer.self_attn(hidden, hidden, hidden, key_padding_mask=~MASK, average_attn_weights=False)[1])
            torch.backends.mha.set_fastpath_enabled(False)
            hidden = layer(hidden, src_key_padding_mask=~MASK)
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(probed, fused)
    assert not fused[~MASK].any()
    assert_table(probe.table(), plain_measures(seen, MASK, RELEVANT, causal=False), 2e-6)
    assert not any(module._forward_hooks for module in model.modules())


def test_training_torch_s_encoder_is_the_same_to_the_bit():
    inputs = torch.randn(3, 9, 16)

    def run(probed: bool) -> list[Any]:
        model = encoder(dropout=0.3).train()
        torch.manual_seed(3)
        if probed:
            with AttentionProbe(model, relevant=RELEVANT):
                output = model(inputs, src_key_padding_mask=~MASK)
        else:
            output = model(inputs, src_key_padding_mask=~MASK)
        output[MASK].square().sum().backward()
        return [output, torch.rand(4), *[parameter.grad for parameter in model.parameters()]]

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_s_transformer_has_three_stacks_and_knows_their_padding():
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True).eval()
    source, target, target_mask = torch.randn(3, 9, 16), torch.randn(3, 5, 16), MASK[:, 2:7]
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT, maps={("decoder cross", 1, 0)}) as probe:
        model(
            source, target, src_key_padding_mask=~MASK, tgt_key_padding_mask=~target_mask, memory_key_padding_mask=~MASK
        )
    table = probe.table()
    assert list(table["stack"].unique()) == ["encoder", "decoder", "decoder cross"]
    assert set(of_stack(table, "decoder cross")["queries"]) == {int(target_mask.sum())}
    assert set(of_stack(table, "encoder")["queries"]) == {int(MASK.sum())}
    kept = probe.maps["decoder cross", 1, 0][0]
    rows = kept[target_mask].double()
    on = (RELEVANT & MASK)[target_mask.nonzero()[:, 0]]
    row = of_stack(table, "decoder cross").query("layer == 1 and head == 0").iloc[0]
    assert row["relevant"] == pytest.approx(float((rows * on).sum(-1).mean()), abs=1e-6)
    assert row["entropy"] == pytest.approx(float(torch.special.entr(rows).sum(-1).mean()), abs=1e-6)


def test_the_single_layer_model_s_rows_are_those_of_its_tokens_written_out():
    torch.manual_seed(0)
    counts = torch.tensor([[2.0, 0.0, 1.0, 3.0], [1.0, 1.0, 0.0, 2.0]], dtype=torch.float64)
    relevant = torch.tensor([[True, False, False, False], [False, True, False, False]])
    embedding = torch.randn(4, 5, dtype=torch.float64)
    sequences = Sequences(
        counts=counts,
        query=torch.tensor([1, 2]),
        label=torch.tensor([0, 1]),
        relevant=relevant,
        embedding=embedding,
        classes=2,
    )
    model = SingleLayerAttention(5, 2, Parameterization.FAFO, d_head=3, heads=2, runs=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    plain = model(sequences)
    with AttentionProbe(model) as probe:
        probed = model(sequences)
    assert torch.equal(plain, probed)
    table = probe.table()
    qk = model.products()[0].detach()
    for run in range(2):
        for head in range(2):
            figures: dict[str, list[float]] = {name: [] for name in ("entropy", "largest", "relevant", "chance")}
            for example in range(2):
                keys = [token for token in range(4) for _ in range(int(counts[example, token]))]
                scores = torch.stack(
                    [embedding[key] @ qk[run, head] @ embedding[sequences.query[example]] for key in keys]
                )
                weights, on = scores.softmax(0), relevant[example][keys]
                figures["entropy"].append(float(torch.special.entr(weights).sum()))
                figures["largest"].append(float(weights.max()))
                figures["relevant"].append(float(weights[on].sum()))
                figures["chance"].append(float(on.double().mean()))
            row = table[(table["stack"] == f"run {run}") & (table["head"] == head)].iloc[0]
            assert row["queries"] == 2
            for name, values in figures.items():
                assert row[name] == pytest.approx(np.mean(values), abs=1e-12), name
    with pytest.raises(CallError, match="one row of attention for each sequence, and no maps to keep"):
        AttentionProbe(model, maps="all")
    assert probe._repr_html_().count("<svg") == 1
    assert probe.examples().empty


def test_a_model_trained_in_parallel_is_watched_inside(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = eager(Tiny("GPT2LMHeadModel", gpt2, "").build())
        parallel = nn.parallel.DistributedDataParallel(model)
        with AttentionProbe(parallel) as probe:
            parallel(IDS).logits.sum().backward()
        assert set(probe.table()["queries"]) == {27}
    finally:
        torch.distributed.destroy_process_group()


class Shifted(nn.Module):
    """Attends from a sequence to the same sequence in a tensor of its own, to another one, or to a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, vectors: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.attention(vectors, other, other)[0]


class OwnKernel(nn.Module):
    """The same by torch's kernel in one head."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, vectors: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        queries, keys = self.queries(vectors)[:, None], self.keys(other)[:, None]
        return nn.functional.scaled_dot_product_attention(queries, keys, keys)[:, 0]


@pytest.mark.parametrize("kind", [Shifted, OwnKernel])
def test_two_tensors_of_one_shape_are_one_sequence_only_if_their_values_are_equal(kind):
    torch.manual_seed(0)
    model, vectors, longer = kind().eval(), torch.randn(3, 9, 16), torch.randn(3, 12, 16)
    tables = {}
    for name, other in (("same", vectors), ("equal", vectors.clone()), ("moved", vectors + 1), ("longer", longer)):
        with torch.no_grad(), AttentionProbe(model) as probe:
            model(vectors, other)
        tables[name] = probe.table()
    pd.testing.assert_frame_equal(tables["same"], tables["equal"])
    reason = "a layer was called with different tensors of one shape, which may be one sequence or two"
    assert set(tables["moved"]["unknown"]) == {f"self, previous, next: {reason}"}
    assert tables["moved"]["sink"].notna().all()
    assert tables["moved"]["self"].isna().all()
    assert tables["moved"]["entropy"].notna().all()
    assert "unknown" not in tables["longer"]
    assert tables["longer"]["sink"].notna().all()
