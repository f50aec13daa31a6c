"""What lies in a file and is not read is named."""

import os

import pytest
import torch
from qkov.circuits import QkovError, inspect_checkpoint, open_checkpoint
from transformers import GPT2Config, GPT2LMHeadModel


def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=4, n_embd=32, n_positions=16, vocab_size=50))


def test_containers_beside_the_model(tmp_path):
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    state = made.state_dict()
    saved = {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "history": [{"loss_map": torch.ones(3)}],
        "callback": os.getcwd,
        "epoch": 3,
    }
    torch.save(saved, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt", heads=4)
    count = sum(len(values) for values in saved["optimizer"]["state"].values())
    assert checkpoint.not_read == {
        "optimizer": f"{count} tensors",
        "history": "1 tensor",
        "callback": "an object of posix.getcwd, which only code could build",
    }
    assert inspect_checkpoint(checkpoint)["not_read"] == checkpoint.not_read


def test_of_several_models_the_others_are_named(tmp_path):
    state = model().state_dict()
    torch.save({"model": state, "ema": state}, tmp_path / "a.pt")
    assert open_checkpoint(tmp_path / "a.pt", heads=4, prefix="ema.transformer").not_read == {
        "model": f"{len(state)} tensors"
    }


def test_a_state_dict_by_itself_has_no_containers(tmp_path):
    torch.save(model().state_dict(), tmp_path / "a.pt")
    assert open_checkpoint(tmp_path / "a.pt", heads=4).not_read == {}
    torch.save(model(), tmp_path / "b.pt")
    assert open_checkpoint(tmp_path / "b.pt").not_read == {}


@pytest.mark.filterwarnings("ignore")
def test_weights_in_another_form_are_named_where_no_others_are_found(tmp_path):
    state = model().state_dict()
    quantised = {
        name: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8) if "attn" in name and tensor.ndim == 2 else tensor
        for name, tensor in state.items()
    }
    torch.save({"model": quantised}, tmp_path / "a.pt")
    with pytest.raises(QkovError, match=r"attn\.c_attn\.weight of .* is not read, since it is quantised by torch;"):
        open_checkpoint(tmp_path / "a.pt", heads=4)


class Unknown(torch.Tensor):
    """A tensor of a library that is not known."""


def test_a_tensor_of_an_unknown_kind_is_named(tmp_path):
    saved = {"w": torch.ones(2, 2).as_subclass(Unknown), "b": torch.ones(2)}
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(
        QkovError, match=r"w of .* is not read, since it is a tensor of \S+Unknown, and what its numbers"
    ):
        open_checkpoint(tmp_path / "a.pt")


def test_weights_under_an_adapter(tmp_path):
    torch.save({"h.0.q.base_layer.weight": torch.ones(2, 2), "h.0.q.ia3_l": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(QkovError, match=r"adapters of PEFT, such as h\.0\.q\.base_layer\.weight; merge them first"):
        open_checkpoint(tmp_path / "a.pt")
