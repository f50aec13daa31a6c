"""Work and memory are bounded by the bytes of an input, never by a number that it states, and only files are opened."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch
from qkov.circuits import CallError, QkovError, find_checkpoints, inspect_checkpoint, open_checkpoint, read_mapping
from qkov.circuits.architectures.config_lookups import _kind_of_layer
from qkov.circuits.architectures.fitting import _divisors
from qkov.circuits.weights.rope_scaling import scaled_rotary
from qkov.reports.commands.main import run
from qkov.reports.terminal.inspection_text import inspection_lines
from safetensors.torch import save_file

#: Seconds of CPU time, as the fuzzers allow them.
LIMIT = 2


@pytest.fixture(autouse=True)
def in_time():
    begun = time.process_time()
    yield
    assert time.process_time() - begun < LIMIT


@pytest.fixture(scope="module")
def imported() -> None:
    """Import what the commands need, which takes seconds that are not the inputs'."""
    for command in ("inspect", "track", "report"):
        assert run([command, "there is no such file"]) == 2


def refused(path: Path, message: str, kind: type[QkovError] = QkovError) -> None:
    with pytest.raises(kind, match=message) as caught:
        inspect_checkpoint(open_checkpoint(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def header_alone(path: Path, tensors: dict[str, list[int]], dtype: str) -> Path:
    """Write a safetensors file that states shapes and holds no values."""
    header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


LARGE = {
    "h.0.attn.c_attn.weight": [10**7, 3 * 10**7 + 1],
    "h.0.attn.c_proj.weight": [10**7 + 7, 10**7 + 9],
}


@pytest.mark.parametrize("factor", [1, 100, 10**11])
def test_a_header_that_states_shapes_without_values(tmp_path, factor):
    shapes = {name: [size * factor for size in shape] for name, shape in LARGE.items()}
    refused(header_alone(tmp_path / "a.safetensors", shapes, "F4"), "a.safetensors")


def test_a_header_that_states_a_tensor_of_no_rows_and_any_number_of_columns(tmp_path):
    shapes = {"h.0.attn.c_attn.weight": [0, 3 * 10**9], "h.0.attn.c_proj.weight": [10**9, 0]}
    refused(header_alone(tmp_path / "a.safetensors", shapes, "F32"), "a.safetensors")


def test_a_tensor_of_one_value_that_is_expanded_to_any_shape(tmp_path):
    torch.save({name: torch.zeros(1).expand(shape) for name, shape in LARGE.items()}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt")


def test_divisors_take_as_many_steps_as_the_root():
    assert _divisors(36) == {1, 2, 3, 4, 6, 9, 12, 18, 36}
    assert _divisors(1) == {1}
    assert _divisors(10**12) >= {2**12, 5**12, 10**12}


def llama(folder: Path, **config: object) -> Path:
    """Write two layers of a small LLaMA with a config."""
    torch.manual_seed(0)
    names = [f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in range(2) for role in "qkvo"]
    save_file({name: torch.randn(8, 8) for name in names}, folder / "model.safetensors")
    base = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(base | config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"rope_type": "longrope", "short_factor": 1, "long_factor": 1, "factor": 2}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1], "long_factor": 1, "factor": "2"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": [4], "original_max_position_embeddings": 64}},
        {"rope_scaling": {"rope_type": {}, "factor": 4}},
        {"rope_theta": 10**400},
        {"num_attention_heads": 10**18},
        {"num_attention_heads": 0},
        {"num_attention_heads": [2]},
        {"hidden_size": {"a": 8}, "head_dim": "x"},
    ],
)
def test_numbers_of_a_config_that_cannot_be_used(tmp_path, config):
    refused(llama(tmp_path, **config), r"model\.safetensors|config\.json")


@pytest.mark.parametrize("dims", [10**9, 10**18, -2, 0, 1, 10])
def test_more_dimensions_than_a_head_has_do_not_rotate(dims):
    with pytest.raises(QkovError, match=f"{dims} of 8 dimensions rotate"):
        scaled_rotary(8, dims, 1e4, "halves", None)


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_theta": 1e300, "head_dim": 4, "rope_scaling": {"rope_type": "linear", "factor": 1e300}},
        {"rope_scaling": {"rope_type": "linear", "factor": 1e308}, "rope_theta": 1e308},
    ],
)
def test_dimensions_that_do_not_rotate_have_no_wavelength(tmp_path, rotary):
    """A frequency of 0, found by the fuzzers in a mapping."""
    lines = inspection_lines(inspect_checkpoint(open_checkpoint(llama(tmp_path, **rotary))))
    assert any("to inf tokens" in line for line in lines), lines


def test_more_layers_than_any_file_holds_are_one_line(tmp_path):
    facts = inspect_checkpoint(open_checkpoint(llama(tmp_path, num_hidden_layers=10**15)))
    assert [layer["layer"] for layer in facts["stacks"][0]["layers"]] == [0, 1]
    assert list(facts["skipped"]) == ["layers 2 to 999999999999999"]


def test_kinds_of_layers_that_are_repeated_without_end_are_not_written_out():
    assert [_kind_of_layer([[["global", "local"], 10**15]], number) for number in (0, 1, 2, 11)] == [
        *("global", "local", "global", "local")
    ]
    assert [_kind_of_layer([[["a"], 2], [["b", "c"], 1]], number) for number in range(5)] == ["a", "a", "b", "c", None]
    assert [_kind_of_layer([[[], 10**15], [["b"], 1]], number) for number in (0, 1)] == ["b", None]
    assert [_kind_of_layer(["a", "b"], number) for number in (0, 1, 2)] == ["a", "b", None]
    with pytest.raises(CallError, match="numbers of repetitions"):
        _kind_of_layer([[["a"], "b"]], 0)


@pytest.mark.parametrize("layer", ["9" * 5000, "1234567", "-1", "٣"])
def test_what_is_not_the_number_of_a_layer_is_not_read_as_one(tmp_path, layer):
    names = [f"model.layers.{layer}.self_attn.{role}_proj.weight" for role in "qkvo"]
    save_file({name: torch.randn(8, 8) for name in names}, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", "not recognised")


def test_tables_of_json_and_yaml_that_are_nested_or_stand_for_themselves(tmp_path):
    folder = llama(tmp_path)
    (folder / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    refused(folder, r"config\.json cannot be read as JSON")
    (folder / "config.json").unlink()
    lines = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    (folder / "model_config.yaml").write_text("\n".join(["a0: &a0 [1]", *lines]))
    refused(folder, r"model_config\.yaml cannot be read .*its aliases stand for more entries than it has bytes")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 5000, "cannot be read as TOML"),
        ("a" + ".a" * 100_000 + " = 1", "a line with more than 200 dots"),
        ("heads = 0x" + "f" * 5000, "mapping.toml"),
        ("heads = 1e999", "mapping.toml"),
        ("[norm]\nkind = 1979-05-27", "mapping.toml"),
    ],
)
def test_mappings_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "mapping.toml"
    path.write_text(text)
    with pytest.raises(CallError, match=message) as caught:
        read_mapping(path)
    assert len(str(caught.value)) < 2000


def test_only_regular_files_are_opened(tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    folder.mkdir()
    with pytest.raises(CallError, match="pipe is not a regular file"):
        read_mapping(pipe)
    refused(pipe, "is not a file and not a folder", CallError)
    refused(Path("/dev/zero"), "is not a file and not a folder", CallError)
    refused(folder, "holds no checkpoint")
    refused(tmp_path, "model.safetensors is a folder; expected a regular file")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_a_pipe_under_the_name_of_weights_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"{name} is a pipe, a device or a socket; expected a regular file")


@pytest.mark.parametrize("name", ["config.json", "trainer_state.json", "adapter_config.json"])
def test_a_pipe_beside_weights_is_left_alone(tmp_path, name):
    folder = llama(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert open_checkpoint(folder / "model.safetensors", heads=2).layer_keys == [("", 0), ("", 1)]


@pytest.mark.parametrize("address", ["pipe", "/dev/null"])
def test_commands_refuse_what_is_not_a_file_in_one_line(imported, tmp_path, monkeypatch, capsys, address):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for arguments in (["inspect", address], ["track", address], ["report", address], ["track", ".", "--map", address]):
        assert run(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_legacy_file_that_was_cut_short_anywhere(tmp_path):
    tensors = {f"blocks.0.attn.W_{role}": torch.randn(2, 8, 4) for role in "QKV"}
    torch.save(tensors, tmp_path / "whole.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(1, min(len(content), 4000), 13):
        path.write_bytes(content[:length])
        with pytest.raises(QkovError, match=r"cut\.pt") as caught:
            open_checkpoint(path)
        assert len(str(caught.value).splitlines()) == 1


def test_an_archive_of_several_disks(tmp_path):
    """What zipfile raises while it looks for the end of an archive, found by the fuzzers."""
    tensors = {f"blocks.0.attn.W_{role}": torch.randn(2, 8, 4) for role in "QKV"}
    torch.save(tensors, tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    end = content.rindex(b"PK\x05\x06")
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 1, 0, 2)
    path = tmp_path / "spanned" / "a.pt"
    path.parent.mkdir()
    path.write_bytes(content[:end] + locator + content[end:])
    for address in (path, path.parent):
        with pytest.raises(QkovError, match=r"spanned/a\.pt") as caught:
            open_checkpoint(find_checkpoints(address)[-1].files)
        assert len(str(caught.value).splitlines()) == 1


def test_dictionaries_that_share_themselves_are_not_followed(tmp_path):
    shared: dict[str, object] = {"n": 1}
    for _ in range(60):
        shared = {"a": shared, "b": shared}
    torch.save({"model": {"a": torch.ones(1)}, "shared": shared}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "its containers share their content more often than a file of its size does")
