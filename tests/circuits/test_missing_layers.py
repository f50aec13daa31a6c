"""Layers that a config states but the weights lack are named, for every family whose config states their number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from qkov.circuits import QkovError, inspect_checkpoint, open_checkpoint, open_model
from qkov.circuits.architectures.families import Architecture, architecture_of, architectures
from safetensors.torch import load_file, save_file
from torch import Tensor

from .decoders import BY_NAME as DECODERS
from .decoders import FAMILIES as ALL_DECODERS
from .encoder_decoders import FAMILIES as ENCODER_DECODERS
from .encoder_decoders import t5, translator
from .encoders import CROSS_BERT, two_towers
from .encoders import FAMILIES as ENCODERS
from .family_proof import Family, build, small

#: Their files come without a config that is theirs, or hold one attention alone.
WITHOUT_A_NUMBER = {
    *("easy_transformer", "transformer_lens", "transformer_lens_bridge", "transformer_lens_bridge_conv1d"),
    *("open_clip", "progress_measures", "timm_vit", "torch_attention", "torch_layers", "torch_transformer"),
}
HYBRIDS = {"jamba", "bamba"}
FAMILIES = [*ALL_DECODERS, *ENCODERS, *ENCODER_DECODERS, CROSS_BERT]
_GPT = {"n_layer": 3, "n_head": 2, "n_embd": 8}
_LIT = _GPT | {"rotary_percentage": 0.5, "n_query_groups": 2, "norm_class_name": "RMSNorm", "head_size": 4}
_META = {"dim": 8, "n_layers": 3, "n_heads": 2, "norm_eps": 1e-5}
#: Of codes other than transformers: the file of the numbers, and of a layer each tensor's name and shape.
OF_OTHER_CODES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "nanogpt": ("config.json", _GPT, {"h.{}.attn.c_attn.weight": (24, 8), "h.{}.attn.c_proj.weight": (8, 8)}),
    "mingpt": (
        "config.json",
        _GPT,
        {f"blocks.{{}}.attn.{name}.weight": (8, 8) for name in ("query", "key", "value", "proj")},
    ),
    "litgpt": (
        "model_config.yaml",
        _LIT,
        {
            f"transformer.h.{{}}.{name}.weight": shape
            for name, shape in (("attn.qkv", (24, 8)), ("attn.proj", (8, 8)), ("norm_1", (8,)))
        },
    ),
    "litgpt_alternating": (
        "model_config.yaml",
        _LIT,
        {
            f"transformer.h.{{}}.{name}.weight": shape
            for name, shape in (("attn.attn", (24, 8)), ("attn.proj", (8, 8)), ("norm_1", (8,)))
        },
    ),
    "meta_llama": (
        "params.json",
        _META,
        {
            **{f"layers.{{}}.attention.w{name}.weight": (8, 8) for name in "qkvo"},
            "layers.{}.attention_norm.weight": (8,),
        },
    ),
    "openelm": (
        "config.json",
        {"model_type": "openelm", "num_transformer_layers": 3, "num_query_heads": [2, 2, 2], "head_dim": 4},
        {"layers.{}.attn.qkv_proj.weight": (24, 8), "layers.{}.attn.out_proj.weight": (8, 8)},
    ),
    "lecture_gpt": (
        "config.json",
        _GPT,
        {
            **{f"blocks.{{}}.sa.heads.0.{name}.weight": (8, 8) for name in ("query", "key", "value")},
            "blocks.{}.sa.proj.weight": (8, 8),
        },
    ),
    "plain_blocks": (
        "config.json",
        _GPT,
        {f"blocks.{{}}.attn.{name}_proj.weight": (8, 8) for name in ("q", "k", "v", "out")},
    ),
    "nanochat": (
        "config.json",
        _GPT | {"n_kv_head": 2, "sequence_len": 8},
        {f"transformer.h.{{}}.attn.c_{name}.weight": (8, 8) for name in ("q", "k", "v", "proj")},
    ),
    "torchtune": (
        "config.json",
        {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 3},
        {f"layers.{{}}.attn.{name}_proj.weight": (8, 8) for name in ("q", "k", "v", "output")},
    ),
    "olmo_own": (
        "config.json",
        {"d_model": 8, "n_heads": 2, "n_layers": 3, "layer_norm_type": "rms", "rope": True},
        {"transformer.blocks.{}.att_proj.weight": (24, 8), "transformer.blocks.{}.attn_out.weight": (8, 8)},
    ),
}


def family_of(model_type: str) -> Architecture:
    found = architecture_of(model_type)
    assert found is not None
    return found


def cut(folder: Path, names: set[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert names <= set(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name not in names}, folder / "model.safetensors")


def layer_names(folder: Path, stack: str, layer: int) -> set[str]:
    opened = open_checkpoint(folder)
    (mapping,) = (each for each in opened.stacks if each.stack == stack)
    return {name for of_role in mapping.layers(opened.file.shapes)[layer].values() for name in of_role}


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.name not in HYBRIDS], ids=lambda family: family.name
)
def test_a_layer_that_was_taken_out_is_named_and_the_rest_is_measured(family: Family, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).skipped == {}
    last = len(family.layers) - 1
    cut(tmp_path, layer_names(tmp_path, family.stack, last))
    opened = open_checkpoint(tmp_path)
    whose = " with weights of their own" if "Albert" in family.name else ""
    assert opened.skipped == {
        f"{family.stack} layer {last}".lstrip(): f"config.json says that there are {last + 1} layers{whose}, "
        f"and the attention of {last} of them was found"
    }
    assert [layer for stack, layer in opened.layer_keys if stack == family.stack] == list(range(last))


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_a_layer_without_attention_is_missing_only_where_it_is_not_there(name: str, tmp_path: Path) -> None:
    build(DECODERS[name]).save_pretrained(tmp_path)
    assert list(open_checkpoint(tmp_path).skipped) == ["layer 0 (Mamba)"]
    tensors = load_file(tmp_path / "model.safetensors")
    cut(tmp_path, {tensor for tensor in tensors if ".layers.0." in tensor})
    assert open_checkpoint(tmp_path).skipped == {
        "layer 0": "config.json says that there are 2 layers, and the attention of 1 of them was found"
    }


@pytest.mark.parametrize("name", OF_OTHER_CODES)
def test_files_of_other_codes_have_their_number_in_configs_of_their_own(name: str, tmp_path: Path) -> None:
    file, config, shapes = OF_OTHER_CODES[name]
    (tmp_path / file).write_text(yaml.safe_dump(config) if file.endswith("yaml") else json.dumps(config))
    weights = {"model_config.yaml": "lit_model.pth", "params.json": "consolidated.00.pth"}.get(file, "model.pt")

    def saved(layers: list[int]) -> dict[str, str]:
        tensors = {template.format(layer): torch.ones(shape) for layer in layers for template, shape in shapes.items()}
        torch.save(tensors, tmp_path / weights)
        opened = open_checkpoint(tmp_path / weights)
        by = "model_type" if "model_type" in config else "its tensor names, with the values"
        assert opened.recognised.startswith(f"as {architectures()[name].title} by {by}")
        return opened.skipped

    assert saved([0, 1, 2]) == {}
    assert saved([0, 2]) == {
        "layer 1": f"{file} says that there are 3 layers, and the attention of 2 of them was found"
    }


def test_no_family_is_without_the_number_but_those_listed() -> None:
    with_one = {
        key for key, family in architectures().items() if all("number_of_layers" in each for each in family.stacks)
    }
    some = {key for key, family in architectures().items() if any("number_of_layers" in each for each in family.stacks)}
    assert with_one == some == set(architectures()) - WITHOUT_A_NUMBER
    proved = {(family_of(family.config().model_type).key, family.stack) for family in FAMILIES}
    proved |= {(name, "") for name in OF_OTHER_CODES}
    stacks = {(key, stack.get("stack", "")) for key in with_one for stack in architectures()[key].stacks}
    # A tower by itself takes its name from the config.
    assert stacks - proved == {("clip_tower", "")}
    assert {("clip_tower", "text"), ("clip_tower", "vision")} <= proved


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2)])
def test_the_two_halves_of_a_model_have_a_number_each(first: int, second: int, tmp_path: Path) -> None:
    sides = {"encoder_layers": first, "decoder_layers": second}
    towers = two_towers("CLIPConfig").to_dict()
    towers["text_config"]["num_hidden_layers"], towers["vision_config"]["num_hidden_layers"] = first, second
    halves_of_t5 = t5("T5Config")
    halves_of_t5.num_layers, halves_of_t5.num_decoder_layers = first, second
    models: dict[str, Any] = {
        "bart": transformers.BartModel(translator("BartConfig", **sides)),
        "mbart": transformers.MBartModel(translator("MBartConfig", **sides)),
        "whisper": transformers.WhisperModel(translator("WhisperConfig", begin_suppress_tokens=None, **sides)),
        "t5": transformers.T5Model(halves_of_t5),
        "clip": transformers.CLIPModel(transformers.CLIPConfig(**towers)),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        assert open_checkpoint(tmp_path / name).skipped == {}, name
        one, other = open_checkpoint(tmp_path / name).stacks[:2]
        gone = {(one.stack, first), (other.stack, second)}
        for stack, number in gone:
            cut(tmp_path / name, layer_names(tmp_path / name, stack, number - 1))
        assert open_checkpoint(tmp_path / name).skipped == {
            f"{stack} layer {number - 1}": f"config.json says that there are {number} layers, and the attention of "
            f"{number - 1} of them was found"
            for stack, number in gone
        }, name


def of_six_layers(folder: Path) -> dict[str, Tensor]:
    transformers.LlamaForCausalLM(small("LlamaConfig", num_hidden_layers=6)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def without(folder: Path, *layers: int) -> dict[str, str]:
    tensors = of_six_layers(folder)
    cut(folder, {name for name in tensors if any(f".layers.{layer}." in name for layer in layers)})
    return open_checkpoint(folder).skipped


@pytest.mark.parametrize(
    ("layers", "named", "held"),
    [
        ((3,), "layer 3", 5),
        ((0,), "layer 0", 5),
        ((3, 4, 5), "layers 3 to 5", 3),
        ((0, 2, 3, 5), "layers 0, 2 to 3, 5", 2),
    ],
)
def test_a_cut_anywhere_is_told(layers: tuple[int, ...], named: str, held: int, tmp_path: Path) -> None:
    reason = f"config.json says that there are 6 layers, and the attention of {held} of them was found"
    assert without(tmp_path, *layers) == {named: reason}
    assert inspect_checkpoint(open_checkpoint(tmp_path))["skipped"] == {named: reason}


def test_layers_beyond_the_number_are_named_and_left_out(tmp_path: Path) -> None:
    of_six_layers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    beyond = {
        "layers 4 to 5": "config.json says that there are 4 layers, so the model does not use them; "
        "if it does, correct the number in the config"
    }
    assert open_checkpoint(tmp_path).skipped == beyond
    assert [weights.layer for weights in open_checkpoint(tmp_path).layers()] == [0, 1, 2, 3]
    cut(tmp_path, layer_names(tmp_path, "", 1))
    assert open_checkpoint(tmp_path).skipped == beyond | {
        "layer 1": "config.json says that there are 4 layers, and the attention of 3 of them was found"
    }


def test_a_layer_for_predicting_further_tokens_is_left_out(tmp_path: Path) -> None:
    tensors = of_six_layers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5, "num_nextn_predict_layers": 1}))
    assert list(open_checkpoint(tmp_path).skipped) == ["layer 5"]
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".layers.5." in name}, tmp_path / "model.safetensors"
    )
    with pytest.raises(QkovError, match=r"LLaMA.* has 5 layers, and the first one in the file is 5"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("number", [None, "many", 2.5, True, -3, 0, [6]])
def test_a_config_that_tells_no_number_says_nothing_of_layers(number: Any, tmp_path: Path) -> None:
    of_six_layers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": number}))
    assert open_checkpoint(tmp_path).skipped == {}


def test_a_number_beyond_all_measure_is_told_as_it_is(tmp_path: Path) -> None:
    of_six_layers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**30}))
    assert list(open_checkpoint(tmp_path).skipped) == [f"layers 6 to {10**30 - 1}"]


@pytest.mark.parametrize(("groups", "inner"), [(2, 1), (2, 3), (1, 2)])
def test_shared_layers_count_once(groups: int, inner: int, tmp_path: Path) -> None:
    config = small(
        "AlbertConfig", embedding_size=16, num_hidden_layers=12, num_hidden_groups=groups, inner_group_num=inner
    )
    transformers.AlbertModel(config).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).skipped == {}


def test_one_of_two_models_in_a_file_is_told_of_alone(tmp_path: Path) -> None:
    tensors = of_six_layers(tmp_path)
    student = {f"student.{name}": tensor for name, tensor in tensors.items() if ".layers.4." not in name}
    save_file(
        student | {f"teacher.{name}": tensor.clone() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    assert open_checkpoint(tmp_path, prefix="teacher.model").skipped == {}
    assert list(open_checkpoint(tmp_path, prefix="student.model").skipped) == ["layer 4"]


def test_a_model_in_memory_is_told_of_too() -> None:
    model: Any = transformers.LlamaForCausalLM(small("LlamaConfig", num_hidden_layers=4))
    assert open_model(model).skipped == {}
    model.model.layers = model.model.layers[:2]
    assert open_model(model).skipped == {
        "layers 2 to 3": "the model's config says that there are 4 layers, and the attention of 2 of them was found"
    }
