"""Weights that torch computes from parts: read as the model computes them, from files and from models in memory."""

import copy
from typing import Any

import pytest
import torch
from qkov.circuits import QkovError, open_checkpoint, open_model
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.checkpoints.views.effective import effective
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import LlamaConfig, LlamaForCausalLM

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
            vocab_size=50,
        )
    )


def with_each(change) -> Any:
    model = llama()
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        for name in PROJECTIONS:
            change(getattr(layer.self_attn, name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def what_it_computes(module: nn.Module) -> Tensor:
    """The matrix of a linear module, as its forward pass shows it."""
    with torch.no_grad():
        return module(torch.eye(32)).T


def assert_effective(checkpoint, model):
    for weights, layer in zip(checkpoint.layers(), model.model.layers, strict=True):
        q, k, v, o = (what_it_computes(getattr(layer.self_attn, name)) for name in PROJECTIONS)
        W_QK = torch.einsum("hdi,hdj->hij", k.unflatten(0, (4, 8)), q.unflatten(0, (4, 8)))
        W_OV = torch.einsum("ohd,hdi->hoi", o.unflatten(1, (4, 8)), v.unflatten(0, (4, 8)))
        torch.testing.assert_close(weights.qk().dense().float(), W_QK, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights.ov().dense().float(), W_OV, rtol=1e-5, atol=1e-5)


def pruned(module: nn.Module):
    prune.random_unstructured(module, "weight", amount=0.5)


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        lambda module: parametrizations.weight_norm(module, dim=1),
        lambda module: parametrizations.weight_norm(module, dim=None),
        nn.utils.weight_norm,
        pruned,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_parts_that_make_up_a_weight(tmp_path, change):
    model = with_each(change)
    torch.save({"model": model.state_dict(), "config": model.config}, tmp_path / "a.pt")
    assert_effective(open_checkpoint(tmp_path / "a.pt"), model)
    assert_effective(open_model(model), model)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    assert_effective(open_checkpoint(tmp_path / "a.safetensors", heads=4), model)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
    ],
)
def test_other_parametrisations_are_at_hand_in_a_model_alone(tmp_path, change):
    model = with_each(change)
    before = copy.deepcopy(model.state_dict())
    opened = open_model(model.train())
    model.eval()
    assert_effective(opened, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.save({"model": model.state_dict(), "config": model.config}, tmp_path / "a.pt")
    with pytest.raises(QkovError) as caught:
        list(open_checkpoint(tmp_path / "a.pt").layers())
    assert "parametri" in str(caught.value)


def test_names_that_only_look_like_parts_stay(tmp_path):
    saved = {
        "mix_g": torch.ones(1, 1, 8),
        "mix_v": torch.ones(1, 1, 8),
        "weight_g": torch.ones(3, 4),
        "weight_v": torch.ones(3, 4),
        "x.parametrizations.weight.original0": torch.ones(3, 1),
        "x.parametrizations.weight.original1": torch.ones(3, 4),
        "x.parametrizations.weight.0.scale": torch.ones(1),
    }
    torch.save(saved, tmp_path / "a.pt")
    assert set(effective(open_weights(tmp_path / "a.pt")).shapes) == set(saved)


@pytest.mark.parametrize(
    ("size", "direction", "are_parts"),
    [
        ((3, 1), (3, 4), True),
        ((1, 4), (3, 4), True),
        ((), (3, 4), True),
        ((1, 1, 1), (1, 1, 4), True),
        # A norm is kept along one dimension at most.
        ((3, 4, 1), (3, 4, 5), False),
        ((2, 4, 1), (2, 4, 5), False),
        ((1, 4), (1, 4), False),
        ((3,), (3, 4), False),
        ((2, 1), (3, 4), False),
    ],
)
def test_parts_are_known_by_their_shapes(tmp_path, size, direction, are_parts):
    torch.save({"a.weight_g": torch.ones(size), "a.weight_v": torch.ones(direction)}, tmp_path / "a.pt")
    found = dict(effective(open_weights(tmp_path / "a.pt")).shapes)
    assert found == ({"a.weight": direction} if are_parts else {"a.weight_g": size, "a.weight_v": direction})


def test_the_norm_is_over_the_dimensions_that_are_not_kept(tmp_path):
    g, v = torch.tensor([[2.0], [5.0]]), torch.tensor([[3.0, 4.0], [5.0, 12.0]])
    mask, original = torch.tensor([[1.0, 0.0]]), torch.tensor([[7.0, 8.0]])
    saved = {"a.weight_g": g, "a.weight_v": v, "b.weight_mask": mask, "b.weight_orig": original, "c": torch.ones(2)}
    torch.save(saved, tmp_path / "a.pt")
    read = effective(open_weights(tmp_path / "a.pt")).read(["c", "a.weight", "b.weight"])
    torch.testing.assert_close(read["a.weight"], torch.tensor([[1.2, 1.6], [25 / 13, 60 / 13]]), rtol=1e-7, atol=0)
    assert read["b.weight"].tolist() == [[7, 0]]
    assert read["c"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "more", [{}, {"a.weight": torch.ones(3, 4), "a.weight_v": torch.ones(3, 4)}], ids=["no direction", "whole weight"]
)
def test_a_size_alone_and_one_beside_the_whole_weight_stay(tmp_path, more):
    saved = {"a.weight_g": torch.ones(3, 1)} | more
    torch.save(saved, tmp_path / "a.pt")
    assert set(effective(open_weights(tmp_path / "a.pt")).shapes) == set(saved)
