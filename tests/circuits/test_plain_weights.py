"""Weights that are only part of what multiplies the stream are refused, since results for them would be wrong."""

import pytest
import torch
from qkov.circuits import QkovError, open_checkpoint
from qkov.circuits.architectures.mapping import parse_mapping
from safetensors.torch import load_file, save_file

from .decoders import BY_NAME
from .family_proof import build

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    build(BY_NAME["llama"]).float().save_pretrained(tmp_path)
    return tmp_path


def change(folder, changes):
    file = folder / "model.safetensors"
    save_file(load_file(file) | changes, file)


@pytest.mark.parametrize("end", ["_scale", "_scale_inv"])
def test_scales_beside_a_weight_that_is_not_quantised(end, folder):
    change(folder, {f"{QUERY}{end}": torch.tensor([0.125])})
    with pytest.raises(QkovError, match=rf"has scales beside it \({QUERY}{end}\) but holds float32 numbers"):
        list(open_checkpoint(folder).layers())
    mapping = parse_mapping({"tensors": {"Q": QUERY, "K": QUERY}, "layout": "linear", "heads": 4}, "a mapping")
    with pytest.raises(QkovError, match="has scales beside it"):
        list(open_checkpoint(folder, mapping).layers())


def test_scales_of_other_weights_than_attention_do_not_matter(folder):
    change(folder, {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)})
    assert len(list(open_checkpoint(folder).layers())) == 2


@pytest.mark.parametrize("name", ["lora_A", "lora_A.default.weight"])
def test_adapters_beside_the_weights(name, folder):
    change(folder, {f"{QUERY.removesuffix('weight')}{name}": torch.ones(2, 48)})
    with pytest.raises(QkovError, match=r"model\.safetensors holds LoRA adapters.*merge_and_unload"):
        open_checkpoint(folder)


def test_adapters_in_place_of_the_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors[QUERY.replace("q_proj", "q_proj.base_layer")] = tensors.pop(QUERY)
    save_file(tensors | {QUERY.replace("q_proj", "q_proj.lora_A"): torch.ones(2, 48)}, folder / "model.safetensors")
    with pytest.raises(QkovError, match="holds LoRA adapters"):
        open_checkpoint(folder)
