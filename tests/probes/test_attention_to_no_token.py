"""How much attention goes to no token: learned sinks, keys that a module adds, padding, and dropped weights."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.probes import AttentionProbe
from torch import nn

from .test_watching_leaves_no_trace import IDS, llama


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_what_goes_to_learned_sinks():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 50}
    config = transformers.GptOssConfig(
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, **sizes
    )
    model: Any = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    for part in model.model.layers:
        part.self_attn.sinks.data = torch.tensor([1.5, -0.5])
    with torch.no_grad(), AttentionProbe(model, measures=["no_token", "entropy"]) as probe:
        output = model(IDS, output_attentions=True)
    wanted = [1 - float(layer[:, head].sum(-1).mean()) for layer in output.attentions for head in range(2)]
    assert probe.table()["no_token"].tolist() == pytest.approx(wanted, abs=1e-6)
    assert all(value > 0.05 for value in wanted)
    # The first query sees itself and the sink: w / (1 - w) of its one weight w is exp(score - sink).
    first = output.attentions[0][0, :, 0, 0].double().numpy()
    scores = np.log(first / (1 - first)) + np.array([1.5, -0.5])
    np.testing.assert_allclose(softmax(np.stack([scores, [1.5, -0.5]], axis=-1))[:, 1], 1 - first, atol=1e-6)


@pytest.mark.parametrize("added", ["zero key", "learned key"])
def test_what_goes_to_the_keys_that_torch_s_module_adds(added):
    torch.manual_seed(0)
    options = {"add_zero_attn": True} if added == "zero key" else {"add_bias_kv": True}
    module = nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()
    vectors = torch.randn(2, 5, 8)
    with torch.no_grad(), AttentionProbe(module) as probe:
        module(vectors, vectors, vectors)
    weight = module.in_proj_weight.detach().double().numpy()
    query, key = (
        (vectors.double().numpy() @ part.T).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
        for part in (weight[:8], weight[8:16])
    )
    extra = np.zeros((2, 4)) if added == "zero key" else module.bias_k.detach().double().numpy().reshape(2, 4)
    key = np.concatenate([key, np.broadcast_to(extra[None, :, None], (2, 2, 1, 4))], axis=2)
    maps = softmax(query @ key.transpose(0, 1, 3, 2) / 2)
    np.testing.assert_allclose(probe.table()["no_token"], maps[..., -1].mean((0, 2)), atol=1e-6)


def test_what_goes_to_padding_that_the_model_does_not_hide():
    model = llama()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad(), AttentionProbe(model, mask=mask) as probe:
        output = model(IDS, output_attentions=True)
    wanted = [float(layer[0, head, 2:, :2].sum(-1).mean()) for layer in output.attentions for head in range(4)]
    assert probe.table()["no_token"].tolist() == pytest.approx(wanted, abs=1e-6)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(IDS, attention_mask=mask)
    assert probe.table()["no_token"].tolist() == pytest.approx([0] * 8, abs=1e-6)
    assert "no token" not in {axes.get_title() for axes in probe.figure().axes}


def test_what_dropout_drops():
    model: Any = llama(1)
    with torch.no_grad():
        (whole,) = model(IDS, output_attentions=True).attentions
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    torch.manual_seed(1)
    with torch.no_grad(), AttentionProbe(model, maps="all") as probe:
        model(IDS)
    kept = torch.stack([probe.maps[0, head][0] for head in range(4)], dim=1)
    dropped = torch.where(kept > 0, 0.0, whole).double()
    wanted = dropped.sum(-1).mean(dim=(0, 2))
    assert float(wanted.min()) > 0.1
    np.testing.assert_allclose(probe.table()["no_token"], wanted, atol=1e-6)


def test_where_the_rate_of_dropout_is_not_known_neither_is_what_it_drops():
    model: Any = llama(1).train()
    attention = model.model.layers[0].self_attn
    attention.attention_dropout = 0.5
    attention.dropout = nn.Dropout(0.25)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(IDS)
    table = probe.table()
    assert table["no_token"].isna().all()
    assert set(table["unknown"]) == {"no_token: the rate of dropout is not known"}
    assert table["finite"].all()
