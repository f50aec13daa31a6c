"""Folders of weights: which file counts, which files beside it are used, and why some cannot be read as they are."""

import json

import pytest
import torch
from qkov.circuits import CallError, QkovError, open_checkpoint
from qkov.circuits.checkpoints.folders import Folder, contents_of, weights_of
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.storage.places import LocalPlace
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel


def sharded(folder, kind="safetensors", weight_map=None):
    """A model of two files, the second of which holds c."""
    folder.mkdir(exist_ok=True)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    parts = [{"a": torch.full((2, 3), 1.0), "b": torch.full((4,), 2.0)}, {"c": torch.full((5,), 3.0)}]
    names = [f"{stem}-0000{number}-of-00002.{kind}" for number in (1, 2)]
    for part, name in zip(parts, names, strict=True):
        (save_file if kind == "safetensors" else torch.save)(part, folder / name)
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map or {"a": names[0], "b": names[0], "c": names[1]}}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("by_folder", [True, False])
def test_an_index_and_its_files_are_one_table(tmp_path, kind, by_folder):
    index = sharded(tmp_path / "m", kind)
    file = open_weights(index.parent if by_folder else index)
    assert file.address == str(index)
    assert set(file.shapes) == {"a", "b", "c"}
    assert len(file.shapes) == 3
    assert dict(file.shapes) == {"a": (2, 3), "b": (4,), "c": (5,)}
    assert "d" not in file.shapes
    read = file.read(["c", "a"])
    assert list(read) == ["c", "a"]
    assert torch.equal(read["a"], torch.full((2, 3), 1.0))
    assert torch.equal(read["c"], torch.full((5,), 3.0))


def test_a_model_that_transformers_saved_in_parts(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=16, vocab_size=64))
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    file = open_weights(tmp_path)
    assert file.config_origin == "config.json"
    assert file.config is not None
    assert file.config["model_type"] == "gpt2"
    state = model.state_dict()
    # The output embedding is that of the input, and is saved once.
    assert set(file.shapes) == set(state) - {"lm_head.weight"}
    for name, tensor in file.read(list(file.shapes)).items():
        assert torch.equal(tensor, state[name]), name


def test_a_lone_shard_says_that_it_is_not_the_whole_model(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=16, vocab_size=64))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    opened = next(found for file in files if (found := _opened(file)) is not None)
    assert len(opened.layer_keys) < 3
    assert opened.skipped == {
        "other files": f"this file is one of {len(files)} shards of a model; "
        "give the folder or the index to read all layers"
    }
    assert open_checkpoint(tmp_path).skipped == {}


def _opened(file):
    """A file that holds whole layers; None where it holds none."""
    try:
        return open_checkpoint(file)
    except QkovError:
        return None


def test_a_shard_is_opened_when_one_of_its_tensors_is_requested(tmp_path):
    index = sharded(tmp_path / "m")
    (index.parent / "model-00002-of-00002.safetensors").write_bytes(b"damaged")
    file = open_weights(index)
    assert file.shapes["b"] == (4,)
    assert file.read(["a"])["a"].shape == (2, 3)
    with pytest.raises(QkovError, match=r"model-00002-of-00002.safetensors cannot be read as safetensors"):
        file.read(["c"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not an index: expected JSON with a weight_map"),
        ("[1]", "is not an index: expected JSON with a weight_map"),
        ("{}", "is not an index: expected JSON with a weight_map"),
        ('{"weight_map": {}}', "names no tensors"),
        ('{"weight_map": {"a": 1}}', "names no tensors"),
        ('{"weight_map": ["a"]}', "names no tensors"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing, but .* names it"),
        *(
            (json.dumps({"weight_map": {"a": out}}), "points outside its folder: .* a is in .*refused")
            for out in (
                *("../model.safetensors", "/etc/passwd", "sub/../../x.safetensors", "C:\\x.safetensors", "..\\x.bin"),
                *("s3://bucket/x.safetensors", "\\\\host\\x.bin"),
            )
        ),
    ],
)
def test_a_damaged_index(tmp_path, content, message):
    (tmp_path / "model.safetensors").touch()
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(QkovError, match=message) as caught:
        open_weights(folder)
    assert "\n" not in str(caught.value)
    assert "model.safetensors.index.json" in str(caught.value)


def test_an_index_that_does_not_match_its_files(tmp_path):
    index = sharded(tmp_path / "m", weight_map={"a": "model-00002-of-00002.safetensors"})
    file = open_weights(index)
    with pytest.raises(QkovError, match=r"says that model-00002-of-00002.safetensors holds a, but it does not"):
        file.read(["a"])
    with pytest.raises(QkovError, match=r"says that model-00002-of-00002.safetensors holds a, but it does not"):
        _ = file.shapes["a"]


def test_the_index_of_an_older_save_does_not_count(tmp_path):
    index = sharded(tmp_path / "m")
    save_file({"new": torch.ones(1)}, tmp_path / "m" / "model.safetensors")
    assert set(open_weights(tmp_path / "m").shapes) == {"a", "b", "c"}
    for part in (tmp_path / "m").glob("model-*"):
        part.unlink()
    assert set(open_weights(tmp_path / "m").shapes) == {"new"}
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(QkovError, match=rf"model-00001-of-00002.safetensors is missing, but {index} names it"):
        open_weights(tmp_path / "m")


ORDER = [
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "consolidated.00.pth",
    "lit_model.pth",
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_most_reliable_weights_of_a_folder_count(tmp_path, first):
    for name in ORDER[first:]:
        (tmp_path / name).write_text('{"weight_map": {"a": "README.md"}}' if name.endswith(".json") else "")
    companions = (
        *("optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state_0.pth", "scaler.pt", "training_args.bin"),
        *("random_states_0.pkl", "README.md", "model.fp16.safetensors", "other.pt", "model-00001-of-00002.safetensors"),
    )
    for name in companions:
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    folder = Folder(LocalPlace(tmp_path))
    contents = contents_of(folder)
    assert contents.weights is not None
    assert contents.weights.name == ORDER[first]
    assert weights_of(Folder(LocalPlace(tmp_path))).name == ORDER[first]
    assert [inner.place.name for inner in folder.subfolders] == ["runs"]


def test_the_only_other_file_counts(tmp_path):
    for name in ("optimizer.pt", "training_args.bin", "my_weights.ckpt"):
        (tmp_path / name).touch()
    assert weights_of(Folder(LocalPlace(tmp_path))).name == "my_weights.ckpt"
    (tmp_path / "more.pt").touch()
    with pytest.raises(QkovError, match=r"holds 2 files of weights \(more.pt, my_weights.ckpt .*give the path of one"):
        weights_of(Folder(LocalPlace(tmp_path)))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["adapter_model.safetensors", "optimizer.pt"], "a PEFT adapter.*its base model.*merge_and_unload"),
        (["adapter_model.bin", "value_head.bin"], "a PEFT adapter"),
        (["pytorch_model_fsdp_0/.metadata"], r"accelerate merge-weights \S+/pytorch_model_fsdp_0 OUT"),
        (["__0_0.distcp"], r"a distributed checkpoint of torch without its file \.metadata"),
        (["zero_to_fp32.py", "latest", "global_step5/x"], r"python (\S+)/zero_to_fp32.py \1 OUT"),
        (
            ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"],
            r"stage 1 or 2; .*py \S+ OUT",
        ),
        (["consolidated.00.pth", "consolidated.01.pth", "params.json"], "in 2 parts, .*convert_llama_weights_to_hf.py"),
        (["mp_rank_00/model_optim_rng.pt"], "Megatron's parts"),
        (["model-00001-of-00003.safetensors"], "no model.safetensors.index.json, .* copy it as well"),
        (["pytorch_model-00001-of-00003.bin", "x.pt"], "no pytorch_model.bin.index.json, .* copy it as well"),
        (["model.fp16.safetensors", "model.fp32.safetensors"], "several variants of one model"),
        (["flax_model.msgpack"], "Flax weights"),
        (["tf_model.h5"], "TensorFlow weights"),
        (["notes.txt"], "holds no checkpoint: expected files that end in .* found notes.txt"),
    ],
)
def test_weights_that_cannot_be_read_as_they_are(tmp_path, files, message):
    folder = tmp_path / "checkpoint"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    with pytest.raises(QkovError, match=message) as caught:
        open_weights(folder)
    assert str(caught.value).startswith(f"{folder} holds ")
    assert "\n" not in str(caught.value)


def test_an_adapter_names_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "EleutherAI/pythia-160m"}')
    with pytest.raises(QkovError, match="merge it into EleutherAI/pythia-160m with peft's"):
        open_weights(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(QkovError, match=r"adapter_config.json cannot be read as the JSON of an adapter"):
        open_weights(tmp_path)


def test_whole_weights_count_where_parts_are_left_over(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "zero_to_fp32.py").touch()
    assert open_weights(tmp_path).shapes == {"a": (1,)}


def weights(folder, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.ones(1)}, folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("name", "content", "config"),
    [
        ("config.json", '{"model_type": "gpt2", "n_head": 4}', {"model_type": "gpt2", "n_head": 4}),
        ("params.json", '{"dim": 512, "n_heads": 8}', {"dim": 512, "n_heads": 8}),
        (
            "model_config.yaml",
            "n_head: 4\nname: pythia-14m\nbias: true\n",
            {"n_head": 4, "name": "pythia-14m", "bias": True},
        ),
        ("lit_config.json", '{"n_head": 4}', {"n_head": 4}),
    ],
)
def test_the_config_beside_the_weights(tmp_path, name, content, config):
    path = weights(tmp_path)
    (tmp_path / name).write_text(content)
    for address in (path, tmp_path, str(tmp_path)):
        file = open_weights(address)
        assert (file.config, file.config_origin) == (config, name)


def test_the_config_above_a_step_folder_counts_and_above_others_does_not(tmp_path):
    weights(tmp_path / "checkpoint-500")
    weights(tmp_path / "final")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert open_weights(tmp_path / "checkpoint-500").config == {"model_type": "gpt2"}
    assert open_weights(tmp_path / "final").config is None
    (tmp_path / "checkpoint-500" / "config.json").write_text('{"model_type": "opt"}')
    assert open_weights(tmp_path / "checkpoint-500").config == {"model_type": "opt"}


def test_a_config_beside_a_torch_file_counts_before_the_one_in_it(tmp_path):
    torch.save({"w": torch.ones(1), "model_args": {"n_head": 4}}, tmp_path / "a.pt")
    assert open_weights(tmp_path).config_origin == "model_args in the file"
    (tmp_path / "config.json").write_text('{"n_head": 8}')
    assert open_weights(tmp_path).config == {"n_head": 8}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", b"\xff\xfe\x00", "config.json cannot be read as JSON"),
        ("config.json", "[1]", "config.json is damaged: expected a table, found a list"),
        ("model_config.yaml", "a: [", "model_config.yaml cannot be read as the YAML"),
        ("model_config.yaml", "just words", "model_config.yaml is damaged: expected a table, found a str"),
        ("trainer_state.json", "{", "trainer_state.json cannot be read as JSON"),
        (
            "trainer_state.json",
            '{"global_step": 5, "log_history": 1}',
            "trainer_state.json cannot be read as a trainer's state, whose log_history",
        ),
        (
            "trainer_state.json",
            '{"log_history": [{"step": 1, "loss": "x"}]}',
            "trainer_state.json cannot be read as a trainer's state, whose log_",
        ),
    ],
)
def test_damaged_sidecars(tmp_path, name, content, message):
    weights(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(QkovError, match=message) as caught:
        open_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_trainers_state_gives_the_loss_and_the_learning_rate_of_the_step(tmp_path):
    weights(tmp_path / "checkpoint-20")
    history = [
        {"step": 10, "loss": 3.5, "learning_rate": 0.1, "epoch": 0.5},
        {"step": 20, "loss": 2.5, "learning_rate": 0.05},
        {"step": 20, "eval_loss": 9.0},
        {"step": 30, "loss": 1.5, "learning_rate": 0.01},
    ]
    state = tmp_path / "checkpoint-20" / "trainer_state.json"
    state.write_text(json.dumps({"global_step": 20, "log_history": history}))
    file = open_weights(tmp_path / "checkpoint-20")
    assert file.values == {"loss": 2.5, "learning_rate": 0.05}
    assert file.scalars == file.values
    state.write_text(json.dumps({"global_step": 5, "log_history": history}))
    assert open_weights(tmp_path / "checkpoint-20").scalars == {}


def test_an_address_without_anything(tmp_path):
    with pytest.raises(CallError, match="none does not exist; expected a file that ends in"):
        open_weights(tmp_path / "none")
    with pytest.raises(CallError, match="none does not exist; expected a file that ends in"):
        open_weights(f"file://{tmp_path}/none")
    assert open_weights(f"file://{weights(tmp_path)}").shapes == {"a": (1,)}
