"""What architecture a checkpoint is: by its config, by its names, as asked; and what is told without a config."""

import json
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import CallError, QkovError, open_checkpoint
from qkov.circuits.architectures.config_lookups import cases, filled
from qkov.circuits.architectures.families import architectures, unsupported
from qkov.circuits.architectures.recognition import recognise
from qkov.circuits.architectures.schema import FACTS
from qkov.circuits.architectures.stated_facts import StatedFacts
from qkov.circuits.live.tensors import LiveWeights
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from .decoders import BY_NAME, FAMILIES
from .encoder_decoders import FAMILIES as ENCODER_DECODERS
from .encoders import FAMILIES as ENCODERS
from .family_proof import build, read, read_by_names
from .test_published_configs import OLDER_NAMES

#: A fused W_QKV of nanoGPT's names: where all heads have keys of their own, names and shapes do not tell its order.
_TAKEN_FOR_OTHERS = {"gpt_bigcode"}
NAMES_TELL = [family for family in FAMILIES if family.name not in _TAKEN_FOR_OTHERS]


@pytest.mark.parametrize("family", NAMES_TELL, ids=lambda family: family.name)
def test_names_alone_tell_the_same_weights_and_nothing_that_is_false(family, tmp_path):
    model = build(family)
    told = read(model, tmp_path, family.stack)
    guessed = read_by_names(model, tmp_path, family.stack, heads=told[0].heads)
    assert [weights.layer for weights in guessed] == [weights.layer for weights in told]
    for one, other in zip(told, guessed, strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            assert _same(getattr(one, name), getattr(other, name)), name
        assert_true_or_unknown(one, other)


def assert_true_or_unknown(told, guessed):
    unknown = guessed.facts.unknown
    for each in fields(told.facts):
        truth, claim = getattr(told.facts, each.name), getattr(guessed.facts, each.name)
        if each.name == "rotary" and truth is not None and claim is not None:
            assert (claim.pairing, claim.frequencies) in {(truth.pairing, truth.frequencies), (truth.pairing, None)}
        elif each.name != "unknown":
            assert claim == truth or each.name in unknown, each.name
    for name in ("norm", "query_norm", "key_norm"):
        truth, claim = getattr(told, name), getattr(guessed, name)
        if claim is None:
            assert truth is None or "norm" in unknown, name
        else:
            assert _same(claim.gain, truth.gain)
            assert _same(claim.bias, truth.bias)
            assert claim.eps in (None, truth.eps)
            assert claim.kind == truth.kind or (claim.kind is None and "query_key_norm" in unknown)


def _same(one, other):
    return one is other if one is None or other is None else torch.equal(one, other)


def _of_same_names(name, **changes):
    with torch.device("meta"):
        return getattr(transformers, name.replace("Config", "Model"))(getattr(transformers, name)(**changes))


_TWO = {"num_hidden_layers": 2, "vocab_size": 50}


@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        (lambda: _of_same_names("ImageGPTConfig", n_layer=2), {"norm"}),
        (lambda: _of_same_names("RoFormerConfig", **_TWO), {"rotary", "positions"}),
        (lambda: _of_same_names("SpeechT5Config", decoder_layers=2, encoder_layers=2), {"norm", "causal"}),
        (lambda: _of_same_names("MegatronBertConfig", **_TWO), None),
        (lambda: _of_same_names("RobertaPreLayerNormConfig", **_TWO), None),
        (lambda: _of_same_names("XLMRobertaXLConfig", **_TWO), None),
        (lambda: _of_same_names("Lfm2Config"), None),
        (lambda: _of_same_names("SamConfig"), None),
    ],
    ids=["imagegpt", "roformer", "speecht5", "megatron-bert", "prelayernorm", "xlm-roberta-xl", "lfm2", "sam"],
)
def test_a_family_does_not_claim_the_norm_of_others_that_have_its_names(model, unknown):
    file = LiveWeights(model().state_dict(), "the file")
    if unknown is None:
        with pytest.raises(QkovError, match="are not recognised"):
            recognise(file, heads=4)
        return
    (mapping,) = recognise(file, heads=4).stacks
    assert unknown <= mapping.facts.unknown


#: Models whose code lies beside their weights; transformers does not know them.
_OF_OTHERS = {model_type for _, model_type in OLDER_NAMES} | {"hf_olmo", "openelm", "deci", "nemotron-nas"}
KNOWN = [
    (architecture, model_type)
    for architecture in architectures().values()
    for model_type in architecture.model_types
    if model_type not in _OF_OTHERS
]


@pytest.mark.parametrize(("architecture", "model_type"), KNOWN, ids=[model_type for _, model_type in KNOWN])
def test_what_a_silent_config_gives_is_what_the_config_class_has_by_default(architecture, model_type):
    default = CONFIG_MAPPING[model_type]().to_dict()
    for stack in architecture.stacks:
        inner = default.get(stack.get("config_in", ""), default)
        assert stated(stack, {"model_type": model_type}) == stated(stack, inner)


def stated(stack, config):
    """All that a family says of eight layers that have heads of 64 and no tensors."""
    table = {name: value for name, value in filled(stack, config, ()).items() if name in FACTS}
    facts = StatedFacts(table, cases(stack, config, (), frozenset(range(8))))
    norms = [facts.norm(layer, {}) for layer in range(8)]
    head_norms = [facts.head_norm(layer, "query", {}, 64) for layer in range(8)]
    return [facts.of_layer(layer, 64) for layer in range(8)], [
        norm and (norm.kind, norm.eps) for norm in (*norms, *head_norms)
    ]


def test_the_attention_of_every_model_type_that_is_listed_is_compared_with_a_model_s():
    listed = {model_type for family in architectures().values() for model_type in family.model_types}
    built = {family.config().model_type for family in (*FAMILIES, *ENCODERS, *ENCODER_DECODERS)}
    assert listed == built | _OF_OTHERS


def test_no_model_type_is_of_two_families():
    types = [model_type for family in (*architectures().values(), *unsupported()) for model_type in family.model_types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt_neox", "as GPT-NeoX, Pythia by model_type 'gpt_neox' in config.json"),
        ("gemma3 with images", "as Gemma 3 by model_type 'gemma3' in config.json"),
    ],
)
def test_a_config_tells_and_is_named(name, how, tmp_path):
    build(BY_NAME[name]).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).recognised == how


def llama_without_config(folder):
    build(BY_NAME["llama"]).save_pretrained(folder)
    (folder / "config.json").unlink()
    return folder / "model.safetensors"


def test_names_tell_and_the_number_of_heads_has_to_be_given(tmp_path):
    file = llama_without_config(tmp_path)
    with pytest.raises(QkovError, match=r"is LLaMA, .*nothing states its number of heads: give --heads, or put the"):
        open_checkpoint(file)
    opened = open_checkpoint(file, heads=4)
    assert opened.recognised.startswith("as LLaMA, ")
    assert opened.recognised.endswith(" by its tensor names")


def test_a_model_type_that_is_not_known_is_said_with_what_its_names_fit(tmp_path):
    file = llama_without_config(tmp_path)
    config = {"model_type": "newest", "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QkovError, match=r"the model_type 'newest' in config.json, which is unknown.*--family llama"):
        open_checkpoint(file)
    opened = open_checkpoint(file, family="llama")
    assert opened.recognised.endswith("as requested")
    assert [weights.heads for weights in opened.layers()] == [4, 4]


def test_a_family_that_is_not_there_is_said_with_those_that_are(tmp_path):
    with pytest.raises(CallError, match=r"there is no family 'lama'; known are .*llama.*qwen3"):
        open_checkpoint(llama_without_config(tmp_path), family="lama")


def test_a_family_whose_tensors_are_not_there_is_refused(tmp_path):
    file = llama_without_config(tmp_path)
    with pytest.raises(
        QkovError, match=r"should be GPT-J .as requested., but holds none of its attention weights: expected h"
    ):
        open_checkpoint(file, family="gptj", heads=4)


def test_two_copies_of_a_model_are_told_apart_by_their_prefix(tmp_path):
    file = llama_without_config(tmp_path)
    tensors = load_file(file)
    averaged = {f"averaged.{name}": 2 * tensor for name, tensor in tensors.items()}
    save_file(tensors | averaged, file)
    with pytest.raises(QkovError, match=r"under several prefixes, 'averaged.model', 'model': choose one with --prefix"):
        open_checkpoint(file, heads=4)
    one: Any = next(open_checkpoint(file, heads=4, prefix="model").layers())
    other: Any = next(open_checkpoint(file, heads=4, prefix="averaged.model").layers())
    assert torch.equal(other.W_Q, 2 * one.W_Q)


def test_names_of_no_family_are_shown(tmp_path):
    save_file({"mixer.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(QkovError, match=r"are not recognised: the file holds mixer.weight; say which are W_Q"):
        open_checkpoint(tmp_path)
