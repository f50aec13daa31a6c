"""Checkpoints of training on several devices: torch's distributed ones and DeepSpeed's."""

import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from qkov.circuits import QkovError, find_checkpoints, open_checkpoint
from qkov.circuits.checkpoints.opening import open_weights
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.filterwarnings("ignore")

TWO_RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(35.0).reshape(5, 7)
dcp.save(
    {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
        "everywhere": distribute_tensor(whole.double(), mesh, [Replicate()]),
        "plain": whole.int(),
        "step": 30,
    },
    checkpoint_id=f"{folder}/dcp",
)
dist.destroy_process_group()
"""


def saved(folder, state: dict[str, Any]):
    folder.mkdir(parents=True, exist_ok=True)
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


def assert_is_what_torch_merges(folder, tmp_path):
    dcp_to_torch_save(folder, tmp_path / "merged.pt")
    merged = open_weights(tmp_path / "merged.pt")
    file = open_weights(folder)
    assert dict(file.shapes) == dict(merged.shapes)
    assert file.values == merged.values
    expected = merged.read(list(merged.shapes))
    for name, tensor in file.read(list(file.shapes)).items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_one_process(tmp_path):
    state = {
        "model": {"a": torch.randn(4, 3), "t": torch.randn(4, 3).T, "half": torch.randn(5).bfloat16()},
        "optim": {"state": [{"exp_avg": torch.ones(2)}], "lr": 0.1},
        "step": 7,
    }
    folder = saved(tmp_path / "dcp", state)
    assert_is_what_torch_merges(folder, tmp_path)
    assert open_weights(folder).values["step"] == 7
    assert open_weights(folder / ".metadata").shapes["model.a"] == (4, 3)


def test_two_processes(tmp_path):
    calls = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", TWO_RANKS, str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    assert [call.wait(timeout=240) for call in calls] == [0, 0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert_is_what_torch_merges(tmp_path / "dcp", tmp_path)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=50))


def test_a_run_whose_parts_lie_one_folder_down(tmp_path):
    model = gpt2()
    for step in (1000, 2000):
        folder = saved(tmp_path / f"step{step}" / "model_and_optim", {"model": model.state_dict()}).parent
        (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
        (folder / ".metadata.json").write_text("{}")
        (folder / "train").mkdir()
        torch.save({"epoch": 1}, folder / "train" / "rank0.pt")
    assert [each.step for each in find_checkpoints(tmp_path)] == [1000, 2000]
    below = tmp_path / "step1000" / "model_and_optim"
    for address in (tmp_path / "step1000", find_checkpoints(tmp_path)[0].files, below, below / ".metadata"):
        checkpoint = open_checkpoint(address)
        assert checkpoint.config_origin == "config.json"
        layers = list(checkpoint.layers())
        assert [weights.heads for weights in layers] == [4, 4]
        W = model.transformer.h[0].attn.c_attn.weight
        assert torch.equal(layers[0].W_Q, W[:, :32].detach().unflatten(1, (4, 8)).movedim(1, 0))


def test_a_piece_that_changes_makes_another_checkpoint(tmp_path):
    saved(tmp_path / "some" / "dcp", {"w": torch.ones(2), "step": 30})
    (checkpoint,) = find_checkpoints(tmp_path / "some")
    assert (checkpoint.step, checkpoint.step_origin) == (30, "step in the file")
    before = checkpoint.fingerprint()
    (piece,) = (tmp_path / "some" / "dcp").glob("*.distcp")
    os.utime(piece, (0, 0))
    assert checkpoint.fingerprint() != before


def test_fsdp_of_accelerate_beside_its_optimizer(tmp_path):
    saved(tmp_path / "pytorch_model_fsdp_0", {"model": {"w": torch.ones(2)}})
    saved(tmp_path / "optimizer_0", {"optim": {"w": torch.ones(2)}})
    assert open_weights(tmp_path).shapes == {"model.w": (2,)}


class Metadata:
    """Rewrites the metadata of a distributed checkpoint by torch's own classes."""

    def __init__(self, folder):
        self.path = folder / ".metadata"
        self.content = pickle.loads(self.path.read_bytes())

    def save(self):
        self.path.write_bytes(pickle.dumps(self.content))


def test_pieces_that_do_not_make_up_their_tensor(tmp_path):
    def changed(name, change):
        folder = saved(tmp_path / name, {"a": torch.arange(6.0).reshape(2, 3)})
        metadata = Metadata(folder)
        change(metadata.content)
        metadata.save()
        with pytest.raises(QkovError) as caught:
            open_weights(folder).read(["a"])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def entry(content):
        return content.state_dict_metadata["a"]

    def info(content):
        return next(iter(content.storage_data.values()))

    assert "make up a tensor" in changed("larger", lambda content: setattr(entry(content), "size", torch.Size([3, 3])))
    huge = torch.Size([10**6, 10**6])
    assert "larger than the whole file" in changed("huge", lambda content: setattr(entry(content), "size", huge))
    assert "which pieces" in changed("none", lambda content: setattr(entry(content), "chunks", None))
    assert "points outside its folder" in changed(
        "outside", lambda content: setattr(info(content), "relative_path", "../whole.distcp")
    )
    assert "is missing" in changed("missing", lambda content: setattr(info(content), "relative_path", "gone.distcp"))
    assert "ends at byte" in changed("moved", lambda content: setattr(info(content), "offset", 40))
    assert "a of" in changed("type", lambda content: setattr(entry(content).properties, "dtype", torch.float64))
    assert "no table" in changed("empty", lambda content: setattr(content, "storage_data", None))


def test_a_distributed_checkpoint_that_was_cut_short(tmp_path):
    folder = saved(tmp_path / "dcp", {"a": torch.ones(100)})
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(QkovError, match="before its tensors do"):
        open_weights(folder).read(["a"])
    (folder / ".metadata").write_bytes(b"\x80\x04 cut")
    with pytest.raises(QkovError, match=r"\.metadata cannot be read as the metadata of a distributed checkpoint"):
        open_weights(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(QkovError, match=r"without its file \.metadata"):
        open_weights(folder)


def test_its_metadata_is_read_without_running_code(tmp_path):
    class Runs:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "was_run"),))

    folder = saved(tmp_path / "dcp", {"a": torch.ones(3)})
    metadata = Metadata(folder)
    metadata.content.planner_data = Runs()
    metadata.save()
    assert open_weights(folder).read(["a"])["a"].tolist() == [1, 1, 1]
    assert not (tmp_path / "was_run").exists()


def deepspeed(run, *names: str) -> Any:
    model = gpt2()
    step = run / "global_step100"
    step.mkdir(parents=True)
    (run / "zero_to_fp32.py").touch()
    (run / "latest").write_text("global_step100")
    (run / "config.json").write_text(json.dumps(model.config.to_dict()))
    state = {"module": model.state_dict(), "ds_config": {"zero_optimization": {"stage": 0}}}
    for name in names:
        torch.save(state, step / name)
    return model


def test_a_whole_model_that_deepspeed_saved(tmp_path):
    model = deepspeed(tmp_path, "mp_rank_00_model_states.pt")
    for address in (tmp_path, tmp_path / "global_step100"):
        checkpoint = open_checkpoint(address)
        assert checkpoint.config_origin == "config.json"
        W = model.transformer.h[1].attn.c_proj.weight
        assert torch.equal(list(checkpoint.layers())[1].W_O, W.detach().unflatten(0, (4, 8)))
    assert [each.step for each in find_checkpoints(tmp_path)] == [100]


def test_a_trainer_s_folder_with_what_deepspeed_saved(tmp_path):
    for step in (50, 100):
        deepspeed(tmp_path / f"checkpoint-{step}", "mp_rank_00_model_states.pt")
    assert [each.step for each in find_checkpoints(tmp_path)] == [50, 100]
    assert open_checkpoint(find_checkpoints(tmp_path)[0].files).config_origin == "config.json"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            r"ZeRO stage 1 or 2; merge them with `python \S+/zero_to_fp32.py \S+ OUT --tag global_step100`, or give",
        ),
        (
            ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            r"of ZeRO stage 3 .*; merge them with `python \S+/zero_to_fp32.py \S+ OUT --tag global_step100`",
        ),
        (["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"], "split over devices by tensor or pipeline"),
        (["mp_rank_00_model_states.pt", "layer_00-model_states.pt"], "split over devices by tensor or pipeline"),
    ],
)
def test_the_advice_about_parts_depends_on_their_kind(tmp_path, names, message):
    deepspeed(tmp_path, *names)
    with pytest.raises(QkovError, match=message):
        open_weights(tmp_path / "global_step100")
