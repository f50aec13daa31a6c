"""Trained models as they are published: figures against dense float64, patterns against the model itself."""

from typing import Any

import torch
import transformers
from qkov.circuits import measure, open_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from .forward_pass import attend, rotated


def assert_figures(figures: dict[str, Tensor], head: int, dense: Tensor):
    """Every norm and rank of one head, from the singular values of the whole matrix."""
    s = torch.linalg.svdvals(dense)
    weights = s / s.sum()
    entropy = -torch.special.xlogy(weights, weights).sum()
    expected = {
        "frobenius_norm": dense.square().sum().sqrt(),
        "spectral_norm": s[0],
        "nuclear_norm": s.sum(),
        "stable_rank": s.square().sum() / s[0].square(),
        "effective_rank": entropy.exp(),
        "omega_largest": 2 * s[0],
        "omega_mean": (1 / dense.shape[0] + 1 / dense.shape[1]) * s.sum(),
        "symmetric_share": ((dense + dense.T) / 2).square().sum() / dense.square().sum(),
        "copying_score": torch.linalg.eigvals(dense).real.sum() / torch.linalg.eigvals(dense).abs().sum(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(
            figures[name][head], value, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
    count = figures["singular_values"].shape[-1]
    torch.testing.assert_close(figures["singular_values"][head], s[:count], rtol=1e-8, atol=1e-10 * float(s[0]))


def test_minilm_s_figures_are_those_of_dense_matrices(minilm):
    state = {name: tensor.double() for name, tensor in load_file(minilm / "model.safetensors").items()}
    checkpoint = open_checkpoint(minilm)
    assert checkpoint.recognised.endswith("by model_type 'bert' in config.json")
    assert checkpoint.layer_keys == [("", layer) for layer in range(6)]
    for weights in checkpoint.layers():
        if weights.layer not in (0, 5):
            continue
        at = f"encoder.layer.{weights.layer}.attention"
        QK, OV = (measure(circuit) for circuit in (weights.qk(), weights.ov()))
        for head in (0, 7, 11):
            rows = slice(32 * head, 32 * head + 32)
            assert_figures(QK, head, state[f"{at}.self.key.weight"][rows].T @ state[f"{at}.self.query.weight"][rows])
            assert_figures(
                OV, head, state[f"{at}.output.dense.weight"][:, rows] @ state[f"{at}.self.value.weight"][rows]
            )


def patterns_of(model: Any, ids: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    with torch.no_grad():
        seen = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
    return seen.hidden_states, seen.attentions


def test_minilm_attends_to_a_sentence_as_its_weights_say(minilm):
    model = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    ids = torch.tensor([tokenizer("the keys to the cabinet are on the table")["input_ids"]])
    streams, patterns = patterns_of(model, ids)
    for weights in open_checkpoint(minilm).layers():
        assert weights.facts.unknown == frozenset()
        assert weights.facts.causal is False
        pattern = attend(weights, streams[weights.layer][0]).pattern
        torch.testing.assert_close(pattern, patterns[weights.layer][0], rtol=1e-6, atol=1e-6)


def test_smollm2_s_figures_are_those_of_dense_matrices(smollm2):
    state = load_file(smollm2 / "model.safetensors")
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.layer_keys == [("", layer) for layer in range(30)]
    for weights in checkpoint.layers():
        if weights.layer not in (0, 17):
            continue
        assert (weights.heads, weights.group_size) == (9, 3)
        at = f"model.layers.{weights.layer}.self_attn"
        Q, K, V, out = (state[f"{at}.{name}_proj.weight"].double() for name in "qkvo")
        QK, OV = (measure(circuit) for circuit in (weights.qk(), weights.ov()))
        for head in (0, 4, 8):
            rows, group = slice(64 * head, 64 * head + 64), slice(64 * (head // 3), 64 * (head // 3) + 64)
            assert_figures(QK, head, K[group].T @ Q[rows])
            assert_figures(OV, head, out[:, rows] @ V[group])
        assert_rotated_scores(weights, Q, K)


def assert_rotated_scores(weights, Q: Tensor, K: Tensor):
    """W_QK(7) gives the score of a query 7 positions behind a key, both rotated where they stand."""
    x, y = torch.randn(2, 576, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k = ((W @ z).view(-1, 1, 64).expand(-1, 12, -1) for W, z in ((Q, x), (K, y)))
    q, k = rotated(q, weights.facts.rotary)[:, 10], rotated(k, weights.facts.rotary)[:, 3].repeat_interleave(3, dim=0)
    torch.testing.assert_close(y @ weights.qk(rotary_offset=7).dense() @ x, (q * k).sum(-1), rtol=1e-9, atol=1e-9)


def test_smollm2_attends_as_its_weights_say(smollm2):
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, attn_implementation="eager", dtype=torch.float64)
    ids = torch.tensor([[1, 504, 2365, 282, 260, 3564, 506, 335]])
    streams, patterns = patterns_of(model, ids)
    for weights in open_checkpoint(smollm2).layers():
        if weights.layer % 10 == 0:
            # The model keeps its rotary tables in float32.
            pattern = attend(weights, streams[weights.layer][0]).pattern
            torch.testing.assert_close(pattern, patterns[weights.layer][0], rtol=1e-4, atol=1e-5)
