"""What a probe says of the examples, and of the mode, that its numbers come from."""

import io
from typing import Any

import pytest
import torch
from qkov.analyses.dynamics import Parameterization, Sequences, SingleLayerAttention
from qkov.probes import AttentionProbe
from torch import nn

from ..analyses.tiny_models import Tiny, small
from .test_watching_leaves_no_trace import IDS, VECTORS, encoder, llama


def test_without_a_relevant_token_there_is_no_attention_on_relevant_tokens():
    model = llama()
    with AttentionProbe(model, relevant=torch.zeros(6)) as probe:
        model(IDS)
    table, examples = probe.table(), probe.examples()
    for name in ("relevant", "chance", "relevant_at_readout", "chance_at_readout"):
        assert table[name].isna().all(), name
    reason = "relevant, chance, relevant_at_readout, chance_at_readout: no example has a relevant token"
    assert set(table["unknown"]) == {reason}
    assert f"not known: {reason}" in probe._repr_html_()
    assert table["finite"].all()
    assert table["entropy"].notna().all()
    assert examples[["rollout", "chance", "attention"]].isna().all(axis=None)
    assert "1 of 1 without a relevant token" in probe._repr_html_()
    probe.figure(["relevant"]).savefig(io.BytesIO())


def test_a_measure_that_no_query_has_says_so():
    model = llama()
    with AttentionProbe(model) as probe:
        model(IDS[:, :1])
    table = probe.table()
    assert table["previous"].isna().all()
    assert set(table["unknown"]) == {"previous, next: no query has such a token"}
    with AttentionProbe(model, measures=["entropy", "sink"], queries=torch.zeros(6)) as probe:
        model(IDS)
    assert set(probe.table()["unknown"]) == {"entropy, sink: no query was counted"}
    with AttentionProbe(model) as probe:
        model(IDS)
    assert "unknown" not in probe.table()


def test_an_example_without_a_relevant_token_does_not_count_for_the_others():
    model = llama()
    relevant = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    with AttentionProbe(model, relevant=relevant) as probe:
        model(IDS.expand(2, -1))
    with AttentionProbe(model, relevant=relevant[:1]) as alone:
        model(IDS)
    for name in ("relevant", "chance", "relevant_at_readout", "chance_at_readout", "entropy"):
        assert probe.table()[name].tolist() == pytest.approx(alone.table()[name].tolist(), abs=1e-6)
    assert probe.examples()["rollout"].isna().tolist() == [False, True]
    assert probe.examples()["attention"].isna().tolist() == [False, True]
    assert "1 of 2 without a relevant token" in probe._repr_html_()
    assert "unknown" not in probe.table()


def test_sequences_of_the_single_layer_model_without_a_relevant_entry_do_not_count_either():
    torch.manual_seed(0)
    model = SingleLayerAttention(4, 2, Parameterization.CACO)
    counts, relevant = torch.tensor([[2.0, 1, 0], [1, 1, 1]]), torch.tensor([[True, False, False], [False] * 3])
    vectors, zeros = torch.randn(3, 4), torch.zeros(2, dtype=torch.long)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(Sequences(counts, zeros, zeros, relevant, vectors, 2))
    with torch.no_grad(), AttentionProbe(model) as alone:
        model(Sequences(counts[:1], zeros[:1], zeros[:1], relevant[:1], vectors, 2))
    assert alone.table()["chance"].tolist() == pytest.approx([2 / 3] * len(alone.table()))
    for name in ("relevant", "chance"):
        assert probe.table()[name].tolist() == pytest.approx(alone.table()[name].tolist(), abs=1e-6)


def test_the_mode_is_said_and_what_dropout_did():
    model: Any = llama().train()
    for part in model.model.layers:
        part.self_attn.attention_dropout = 0.5
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(IDS)
        assert set(probe.table()["mode"]) == {"training, after dropout of 0.5"}
        assert "training mode, after dropout of 0.5" in probe._repr_html_()
        model.eval()
        model(IDS)
    assert set(probe.table()["mode"]) == {"training, after dropout of 0.5; evaluation"}
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(IDS)
    assert "mode" not in probe.table()
    assert "evaluation mode" in probe._repr_html_()


def test_dropout_of_a_module_counts_even_where_the_rest_is_in_evaluation():
    model = Tiny("BertModel", lambda: small("BertConfig", attention_probs_dropout_prob=0.25), "").build().eval()
    model.set_attn_implementation("eager")
    model.encoder.layer[1].attention.self.train()
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(IDS)
    modes = probe.table().groupby("layer")["mode"].first().to_dict()
    assert modes == {0: "evaluation", 1: "training, after dropout of 0.25"}


def test_torch_s_own_attention_is_measured_before_dropout_and_says_so():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True).train()
    with torch.no_grad(), AttentionProbe(layer) as probe:
        layer(VECTORS)
        training = probe.table()
        probe.reset()
        layer.eval()
        layer(VECTORS)
    assert set(training["mode"]) == {"training, before dropout of 0.5"}
    assert training["entropy"].tolist() == pytest.approx(probe.table()["entropy"].tolist(), abs=1e-5)
    model = encoder().train()
    for part in model.modules():
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    with AttentionProbe(model) as without:
        model(VECTORS)
    assert set(without.table()["mode"]) == {"training, without dropout of attention"}
