"""Names of models that were compiled, sharded or checkpointed when they were saved."""

import pytest
import torch
from qkov.circuits import QkovError, open_checkpoint
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.checkpoints.views.wrapped_names import unwrapped
from safetensors.torch import save_file
from torch import nn


def layers(width: int = 12) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 16) for _ in range(2))


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module._orig_mod"]
)
def test_wrappers_in_the_middle_of_names_are_removed(wrapper, tmp_path):
    state = nn.ModuleDict({"layers": layers()}).state_dict()
    torch.save({name.replace(".self", f".{wrapper}.self"): t for name, t in state.items()}, tmp_path / "wrapped.pt")
    torch.save(state, tmp_path / "plain.pt")
    found, plain = (list(open_checkpoint(tmp_path / name, heads=2).layers()) for name in ("wrapped.pt", "plain.pt"))
    assert [weights.layer for weights in found] == [0, 1]
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one.qk().dense(), other.qk().dense(), rtol=0, atol=0)
        torch.testing.assert_close(one.ov().dense(), other.ov().dense(), rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["model.", "net.", "module.", "state_dict.model.", "_forward_module.model."])
def test_prefixes_of_trainers(prefix, tmp_path):
    state = nn.ModuleDict({"layers": layers()}).state_dict()
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "epoch.ckpt")
    assert open_checkpoint(tmp_path / "epoch.ckpt", heads=2).layer_keys == [("", 0), ("", 1)]


def test_a_file_that_was_not_wrapped_is_itself(tmp_path):
    save_file(nn.ModuleDict({"layers": layers()}).state_dict(), tmp_path / "model.safetensors")
    file = open_weights(tmp_path / "model.safetensors")
    assert unwrapped(file) is file


def test_part_of_a_name_is_not_a_wrapper(tmp_path):
    save_file({"my_orig_mod.x": torch.ones(2), "a._orig_mod.b": torch.zeros(3)}, tmp_path / "model.safetensors")
    file = unwrapped(open_weights(tmp_path / "model.safetensors"))
    assert dict(file.shapes) == {"my_orig_mod.x": (2,), "a.b": (3,)}
    assert torch.equal(file.read(["a.b"])["a.b"], torch.zeros(3))


def test_the_same_weights_twice_are_refused(tmp_path):
    state = nn.ModuleDict({"layers": layers()}).state_dict()
    twice = state | {name.replace("self_attn", "_orig_mod.self_attn"): tensor + 1 for name, tensor in state.items()}
    torch.save(twice, tmp_path / "model.pt")
    with pytest.raises(
        QkovError, match=r"holds the same weights twice, as layers\.0\..* and as layers\.0\._orig_mod\."
    ):
        open_checkpoint(tmp_path / "model.pt", heads=2)
    # A mapping speaks of the names as they are.
    tensors = {"QKV": "layers.{layer}._orig_mod.self_attn.in_proj_weight"}
    tensors["O"] = "layers.{layer}._orig_mod.self_attn.out_proj.weight"
    mapping = parse_mapping({"layout": "linear", "heads": 2, "tensors": tensors}, "a test")
    first = next(open_checkpoint(tmp_path / "model.pt", mapping).layers())
    assert first.W_O is not None
    torch.testing.assert_close(first.W_O, (state["layers.0.self_attn.out_proj.weight"] + 1).T.unflatten(0, (2, 6)))
