"""Pickled modules: read with their config, with and without the code that their classes are."""

import sys
import types
from typing import Any

import pytest
import torch
from qkov.circuits import QkovError, open_checkpoint, open_model
from qkov.circuits.checkpoints.opening import open_weights
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=50,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )
    )


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=50))


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: module,
        lambda module: {"model": module},
        lambda module: {"epoch": 3, "net": module, "config": {"lr": 0.1}},
    ],
)
def test_a_module_is_read_with_its_config(tmp_path, make, wrap, trust):
    module = make()
    torch.save(wrap(module), tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt", trust_pickle=trust)
    assert checkpoint.config_origin == f"the config of the pickled {type(module).__name__}"
    found, live = list(checkpoint.layers()), list(open_model(module).layers())
    assert len(found) == 2
    for one, other in zip(found, live, strict=True):
        assert torch.equal(one.qk("folded").dense(), other.qk("folded").dense())
        assert torch.equal(one.ov().dense(), other.ov().dense())
        assert one.facts == other.facts


def test_a_config_beside_a_state_dict(tmp_path):
    module = llama()
    torch.save({"model": module.state_dict(), "config": module.config}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert checkpoint.config_origin == "config in the file"
    assert [weights.group_size for weights in checkpoint.layers()] == [2, 2]


def test_buffers_that_a_state_dict_lacks_are_left_out(tmp_path):
    module = nn.Linear(2, 3)
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("mask", torch.ones(4), persistent=False)
    torch.save(nn.Sequential(module), tmp_path / "a.pt")
    names = {"0.weight", "0.bias", "0.kept"}
    assert set(open_weights(tmp_path / "a.pt").shapes) == names
    assert set(open_weights(tmp_path / "a.pt", trust_pickle=True).shapes) == names


def test_two_modules_share_no_config(tmp_path):
    torch.save({"student": llama(), "teacher": gpt2()}, tmp_path / "a.pt")
    assert open_weights(tmp_path / "a.pt").config is None


@pytest.mark.parametrize("leave", ["module", "class"])
def test_a_class_that_is_not_installed_is_named(tmp_path, monkeypatch, leave):
    stranger = types.ModuleType("a_stranger")
    exec("import torch\nclass Net(torch.nn.Linear): pass\nclass Settings: pass", stranger.__dict__)
    monkeypatch.setitem(sys.modules, "a_stranger", stranger)
    net = vars(stranger)["Net"](2, 3)
    torch.save({"net": net, "settings": vars(stranger)["Settings"]()}, tmp_path / "a.pt")
    if leave == "module":
        monkeypatch.delitem(sys.modules, "a_stranger")
    else:
        del vars(stranger)["Net"]
    missing = "the module a_stranger" if leave == "module" else r"the class a_stranger\.Net"
    with pytest.raises(QkovError, match=rf"a\.pt needs {missing}, which is not installed here.*without --trust-pickle"):
        open_weights(tmp_path / "a.pt", trust_pickle=True)
    file = open_weights(tmp_path / "a.pt")
    assert torch.equal(file.read(["net.weight"])["net.weight"], net.weight)
    assert file.unread == {"settings": "an object of a_stranger.Settings, which only code could build"}


def test_code_that_fails_under_trust_is_one_line(tmp_path):
    class Fails:
        def __reduce__(self):
            return (exec, ("raise ZeroDivisionError('first\\nsecond')",))

    torch.save({"a": torch.ones(1), "b": Fails()}, tmp_path / "a.pt")
    with pytest.raises(QkovError, match=r"a\.pt cannot be read as a PyTorch file \(first\)"):
        open_weights(tmp_path / "a.pt", trust_pickle=True)
    assert open_weights(tmp_path / "a.pt").shapes == {"a": (1,)}
