"""Configs that say what cannot be, or that are of another model: one line that names the file and what it says."""

import json
import re

import pytest
import transformers
from qkov.circuits import CallError, QkovError, open_checkpoint

from .decoders import BY_NAME
from .family_proof import build, small


def smollm3():
    return transformers.SmolLM3ForCausalLM(small("SmolLM3Config", num_key_value_heads=2, pad_token_id=0))


MODELS = {"smollm3": smollm3} | {
    name: lambda name=name: build(BY_NAME[name]) for name in ("llama", "gemma2", "gpt_neo")
}


def refused(folder, name, changes):
    MODELS[name]().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(QkovError) as caught:
        list(open_checkpoint(folder).layers())
    assert not isinstance(caught.value, CallError)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("llama", {"num_attention_heads": "4"}, "heads should be of type int, got '4'"),
        ("llama", {"num_attention_heads": 0}, "heads should be at least 1, got 0"),
        ("llama", {"rms_norm_eps": "small"}, "norm.eps of LLaMA.* should be of type int or float, got 'small'"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "says query_pre_attn_scalar = 0, where a number above 0"),
        ("gemma2", {"query_pre_attn_scalar": "4"}, "says query_pre_attn_scalar = '4', where a number above 0"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "says 0 where a number of layers"),
        (
            "gpt_neo",
            {"attention_layers": None, "attention_types": [[["local"], "x"]]},
            "kinds of layers and their numbers of repetitions",
        ),
    ],
)
def test_what_a_config_cannot_say(name, changes, told, tmp_path):
    message = refused(tmp_path, name, changes)
    assert message.startswith(f"config.json of {tmp_path / 'model.safetensors'} cannot be used: ")
    assert re.search(told, message)


@pytest.mark.parametrize(
    ("changes", "said", "shown"),
    [
        ({"hidden_size": 96}, "hidden_size = 96", 48),
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1", 2),
        # The config states the width of a head, so the queries show how many there are.
        ({"num_attention_heads": 2}, "the number of heads = 2", 4),
        ({"num_attention_heads": 5}, "the number of heads = 5", 4),
    ],
)
def test_a_config_of_another_model(changes, said, shown, tmp_path):
    message = refused(tmp_path, "llama", changes)
    assert f"says {said}, but the shapes of the weights say {shown}, so they belong to different models" in message


def test_heads_that_do_not_divide_are_named(tmp_path):
    message = refused(tmp_path, "llama", {"num_attention_heads": 5, "head_dim": None})
    assert "layers.0.self_attn.q_proj.weight has shape (48, 48), which does not fit 5 heads" in message


def test_a_config_that_is_nested_without_end(tmp_path):
    MODELS["llama"]().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(QkovError, match=r"config\.json cannot be read as JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("heads", [0, -4])
def test_a_number_of_heads_that_cannot_be_is_a_wrong_call(heads, tmp_path):
    MODELS["llama"]().save_pretrained(tmp_path)
    with pytest.raises(CallError, match=f"heads should be at least 1, got {heads}"):
        open_checkpoint(tmp_path, heads=heads)
