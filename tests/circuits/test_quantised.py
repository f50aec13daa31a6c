"""Quantised weights: the values that they stand for, to the last bit, or a refusal that names the form."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import QkovError, open_checkpoint, open_model
from qkov.circuits.checkpoints.quantised import other_form
from safetensors.torch import load_file, save_file
from torch import Tensor

from .family_proof import small

FP8 = torch.float8_e4m3fn
Stored = dict[str, Tensor]


def llama() -> Any:
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.LlamaForCausalLM(small("LlamaConfig", **settings))


def per_tensor(weight: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor, Tensor]:
    """The stored values, the scale, and their exact product."""
    scale = (weight.abs().max() / 448).reshape(1)
    stored = (weight / scale).to(dtype)
    return stored, scale, stored.double() * scale.double()


def per_row(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    stored = (weight / scale).to(FP8)
    return stored, scale, stored.double() * scale.double()


def integers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return stored, scale, stored.double() * scale.double()


def per_block(weight: Tensor, rows: int = 12, columns: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks that do not divide the weight, element by element."""
    shape = math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns)
    scale = torch.rand(shape) + 0.5
    stored = weight.to(FP8)
    expected = torch.empty(weight.shape, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            expected[row, column] = stored[row, column].double() * scale[row // rows, column // columns].double()
    return stored, scale, expected


def saved(
    folder: Path,
    quantise: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    name: str,
    more: Callable[[str], Stored] = lambda _: {},
    config: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Save a quantised model; return the values of its attention weights."""
    model, state, expected = llama(), {}, {}
    for key, tensor in model.state_dict().items():
        if "self_attn" in key and "proj" in key:
            module = key.removesuffix("weight")
            state[key], state[module + name], expected[key] = quantise(tensor)
            state |= more(module)
        else:
            state[key] = tensor.clone()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | (config or {})))
    return expected


def assert_values(folder: Path, expected: dict[str, Tensor]) -> None:
    for weights in open_checkpoint(folder).layers():
        at = f"model.layers.{weights.layer}.self_attn."
        for part in "qkv":
            weight = getattr(weights, f"W_{part.upper()}")
            assert weight.dtype is torch.float64
            assert torch.equal(weight.transpose(1, 2).flatten(0, 1), expected[f"{at}{part}_proj.weight"])
        assert torch.equal(weights.W_O.flatten(0, 1).T, expected[f"{at}o_proj.weight"])


@pytest.mark.parametrize("quantise", [per_tensor, per_row, integers, lambda w: per_tensor(w, torch.float8_e5m2)])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scale_weight"])
def test_documented_scales_multiply(quantise: Any, name: str, tmp_path: Path) -> None:
    assert_values(tmp_path, saved(tmp_path, quantise, name))


def test_a_scale_for_each_row_may_have_one_dimension_and_another_type(tmp_path: Path) -> None:
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stored, scale, _ = per_row(weight)
        scale = scale[:, 0].to(torch.bfloat16)
        return stored, scale, stored.double() * scale.double()[:, None]

    assert_values(tmp_path, saved(tmp_path, quantise, "weight_scale"))


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return weight.to(FP8), torch.tensor([0.25]).to(torch.float8_e8m0fnu), weight.to(FP8).double() / 4

    assert_values(tmp_path, saved(tmp_path, quantise, "weight_scale"))


def test_scales_of_blocks_whose_size_the_config_states(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [12, 5]}}
    assert_values(tmp_path, saved(tmp_path, per_block, "weight_scale_inv", config=config))
    saved(tmp_path, per_block, "weight_scale_inv")
    with pytest.raises(QkovError, match=r"has shape \(3, 7\), and no weight_block_size in a config"):
        list(open_checkpoint(tmp_path).layers())
    config["quantization_config"]["weight_block_size"] = [16, 16]
    saved(tmp_path, per_block, "weight_scale_inv", config=config)
    with pytest.raises(QkovError, match=r"has shape \(3, 7\), where blocks of 16 x 16 need \(2, 2\)"):
        list(open_checkpoint(tmp_path).layers())


def test_bitsandbytes_of_8_bits(tmp_path: Path) -> None:
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        largest = weight.abs().amax(dim=1)
        stored = (weight * 127 / largest[:, None]).round().to(torch.int8)
        return stored, largest, stored.double() * largest.double()[:, None] / 127

    def of_format(number: int) -> Callable[[str], Stored]:
        return lambda module: {f"{module}weight_format": torch.tensor(number, dtype=torch.uint8)}

    assert_values(tmp_path, saved(tmp_path, quantise, "SCB", of_format(0)))
    saved(tmp_path, quantise, "SCB", of_format(2))
    with pytest.raises(QkovError, match="in a format of bitsandbytes whose rows are not in order"):
        list(open_checkpoint(tmp_path).layers())


def test_scales_of_activations_do_not_matter(tmp_path: Path) -> None:
    def of_activations(module: str) -> Stored:
        names = ("input_scale", "output_scale", "k_scale", "scale_input")
        return {f"{module}{name}": torch.tensor([7.0]) for name in names}

    assert_values(tmp_path, saved(tmp_path, per_tensor, "weight_scale", of_activations))


@pytest.mark.parametrize("name", ["s", "amax", "scale", "weight_global_scale", "weight.factor"])
def test_a_scale_under_another_name_is_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path, per_tensor, name)
    with pytest.raises(
        QkovError, match=rf"float8_e4m3fn numbers, and .*q_proj\.{name} beside it has no meaning"
    ) as told:
        list(open_checkpoint(tmp_path).layers())
    assert "\n" not in str(told.value)
    assert "dequantise the model with the library that quantised it" in str(told.value)


def test_a_scale_outside_of_the_module_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, per_tensor, "scale_weight", lambda module: {f"scales.{module}factor": torch.ones(1)})
    with pytest.raises(QkovError, match=r"scales\.model\.layers\.0\.self_attn\..*\.factor beside it has no meaning"):
        list(open_checkpoint(tmp_path).layers())


def test_zero_points_and_two_scales_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, integers, "weight_scale", lambda module: {f"{module}weight_zero_point": torch.zeros(1)})
    with pytest.raises(QkovError, match="weight_zero_point beside it has no meaning"):
        list(open_checkpoint(tmp_path).layers())
    saved(tmp_path, per_tensor, "weight_scale", lambda module: {f"{module}scale_weight": torch.ones(1)})
    with pytest.raises(QkovError, match=r"several scales are beside it, .*scale_weight, .*weight_scale"):
        list(open_checkpoint(tmp_path).layers())
    saved(tmp_path, lambda weight: (weight.to(torch.int32), torch.ones(1), weight), "weight_scale")
    with pytest.raises(QkovError, match="int32 numbers, in which several numbers may be packed"):
        list(open_checkpoint(tmp_path).layers())


def test_blocks_of_one_row(tmp_path: Path) -> None:
    config = {"quantization_config": {"weight_block_size": [1, 5]}}
    assert_values(tmp_path, saved(tmp_path, lambda weight: per_block(weight, 1, 5), "weight_scale", config=config))


@pytest.mark.parametrize("size", [12, [], [0, 5], [12, -5], [12.0, 5], ["12", "5"], {"rows": 12}])
def test_a_block_size_that_is_none_is_not_used(size: Any, tmp_path: Path) -> None:
    saved(tmp_path, per_block, "weight_scale", config={"quantization_config": {"weight_block_size": size}})
    with pytest.raises(QkovError, match=r"has shape \(3, 7\), and no weight_block_size in a config says to what"):
        list(open_checkpoint(tmp_path).layers())


def test_blocks_of_another_number_of_dimensions_are_refused(tmp_path: Path) -> None:
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return weight.to(FP8), torch.ones(math.ceil(weight.shape[0] / 12)), weight

    saved(tmp_path, quantise, "weight_scale", config={"quantization_config": {"weight_block_size": [12]}})
    with pytest.raises(QkovError, match=r"has shape \(3,\), where blocks of 12 need \(3,\)"):
        list(open_checkpoint(tmp_path).layers())


def test_a_compression_config_states_the_block_size_as_well(tmp_path: Path) -> None:
    config = {"compression_config": {"weight_block_size": [12, 5]}}
    assert_values(tmp_path, saved(tmp_path, per_block, "weight_scale", config=config))


def test_scales_of_integers_and_scales_beside_whole_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, lambda weight: (weight.to(FP8), torch.ones(1, dtype=torch.int32), weight), "weight_scale")
    with pytest.raises(QkovError, match="weight_scale holds int32 numbers, where floating-point numbers are read"):
        list(open_checkpoint(tmp_path).layers())
    saved(tmp_path, lambda weight: (weight.to(torch.bfloat16), torch.ones(1), weight), "weight_scale")
    with pytest.raises(QkovError, match=r"has scales beside it \(.*weight_scale\) but holds bfloat16 numbers"):
        list(open_checkpoint(tmp_path).layers())


def test_parts_of_bitsandbytes_go_with_integers_and_rows_alone(tmp_path: Path) -> None:
    def rows_of(stored: Tensor, largest: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        return lambda weight: (stored.expand(weight.shape).clone(), largest.clone(), weight)

    byte = torch.ones(1, 1, dtype=torch.int8)
    saved(tmp_path, rows_of(byte, torch.ones(5)), "SCB")
    with pytest.raises(QkovError, match="in a format of bitsandbytes whose rows are not in order"):
        list(open_checkpoint(tmp_path).layers())
    saved(tmp_path, rows_of(byte.to(FP8), torch.ones(32)), "SCB")
    with pytest.raises(QkovError, match="holds float8_e4m3fn numbers, and no scale is beside it"):
        list(open_checkpoint(tmp_path).layers())
    saved(tmp_path, integers, "weight_scale", lambda module: {f"{module}SCB": torch.ones(32)})
    with pytest.raises(QkovError, match="holds int8 numbers, and several scales are beside it"):
        list(open_checkpoint(tmp_path).layers())


def test_bitsandbytes_whose_format_is_not_stated_has_its_rows_in_order(tmp_path: Path) -> None:
    def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        largest = weight.abs().amax(dim=1)
        stored = (weight * 127 / largest[:, None]).round().to(torch.int8)
        return stored, largest, stored.double() * largest.double()[:, None] / 127

    assert_values(tmp_path, saved(tmp_path, quantise, "SCB"))


def test_metadata_that_speaks_of_quantisation_asks_for_a_scale(tmp_path: Path) -> None:
    saved(tmp_path, only_cast, "input_scale")
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, metadata={"Quantization": "fp8"})
    with pytest.raises(QkovError, match=r"no scale is beside it \(the file's metadata has Quantization\)"):
        list(open_checkpoint(tmp_path).layers())


def test_another_form_is_looked_for_under_the_names_that_are_asked_for():
    names = ["a.attn.weight", "a.mlp.qweight", "b.mlp.qweight.more"]
    assert other_form(names, "attn") is None
    found = other_form(names)
    assert found is not None
    assert "such as a.mlp.qweight;" in found
    assert other_form(names, "mlp") == found


def only_cast(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weight.to(FP8), torch.ones(1), weight.to(FP8).double()


def test_float8_without_a_scale_is_read_unless_something_says_that_it_has_one(tmp_path: Path) -> None:
    expected = saved(tmp_path, only_cast, "input_scale")
    first = next(iter(open_checkpoint(tmp_path).layers()))
    weight = expected["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(first.W_Q.double().transpose(1, 2).flatten(0, 1), weight)
    saved(tmp_path, only_cast, "input_scale", config={"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(QkovError, match=r"no scale is beside it \(config.json has a quantization_config\)"):
        list(open_checkpoint(tmp_path).layers())
    saved(tmp_path, only_cast, "input_scale", lambda _: {"scaled_fp8": torch.empty(0, dtype=FP8)})
    with pytest.raises(QkovError, match=r"no scale is beside it \(the file has the mark scaled_fp8\)"):
        list(open_checkpoint(tmp_path).layers())


def test_a_live_model_with_scales(tmp_path: Path) -> None:
    model = llama()
    expected = {}
    for layer, block in enumerate(model.model.layers):
        for part in "qkvo":
            module = getattr(block.self_attn, f"{part}_proj")
            stored, scale, value = per_tensor(module.weight.detach())
            module.weight = torch.nn.Parameter(stored, requires_grad=False)
            module.register_buffer("weight_scale", scale)
            expected[f"{layer}{part}"] = value
    for weights in open_model(model).layers():
        assert torch.equal(weights.W_Q.transpose(1, 2).flatten(0, 1), expected[f"{weights.layer}q"])


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (("qweight", "qzeros", "scales"), r"GPTQ or AWQ packed \(qweight\), such as .*k_proj\.qweight"),
        (("weight_packed", "weight_scale"), "compressed-tensors packed"),
        (("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"), "4-bit numbers of bitsandbytes"),
        (("W_q", "scale"), "integers of HQQ"),
        (("parametrizations.weight.original0", "parametrizations.weight.original1"), "a parametrised weight"),
        (("weight_g", "weight_v"), "a parametrised weight"),
    ],
)
@pytest.mark.parametrize("with_config", [True, False])
def test_weights_in_another_form_are_named(ends: tuple[str, ...], told: str, with_config: bool, tmp_path: Path) -> None:
    model, state = llama(), {}
    for key, tensor in model.state_dict().items():
        if "self_attn" in key:
            state |= {key.removesuffix("weight") + end: torch.zeros(64, 1, dtype=torch.uint8) for end in ends}
        else:
            state[key] = tensor
    save_file(state, tmp_path / "model.safetensors")
    if with_config:
        (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    with pytest.raises(QkovError, match=told) as caught:
        list(open_checkpoint(tmp_path, heads=None if with_config else 4).layers())
    assert "\n" not in str(caught.value)
    assert "save it" in str(caught.value)
