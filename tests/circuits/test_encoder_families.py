"""Encoders and encoder-decoders of transformers: attention from the extracted weights alone is the model's own."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits.attention_weights import BIASES, NAMES
from qkov.circuits.errors import QkovError
from qkov.circuits.reading import open_checkpoint
from torch import Tensor, nn

from .family_proof import LENGTH, Family, assert_same, build, prove, read, read_by_names, run, small

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT: dict[str, Any] = {"block": "encoder.layer.{layer}", "attention": "encoder.layer.{layer}.attention.output.dense"}


def _vision(name: str, **changes: Any) -> Any:
    """Four patches, so that with the class token there are five positions."""
    settings = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "image_size": 8,
        "patch_size": 4,
    }
    return getattr(transformers, name)(**(settings | changes))


def _two_towers(name: str) -> Any:
    config = getattr(transformers, name)
    return config(
        text_config=small(f"{name[:-6]}TextConfig", **_SPECIAL).to_dict(),
        vision_config=_vision(f"{name[:-6]}VisionConfig", num_attention_heads=3).to_dict(),
    )


def _pixels(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64)}


def _text_and_pixels(config: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 50, (1, LENGTH))} | _pixels(config)


def _both_sides(config: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 50, (1, LENGTH)), "decoder_input_ids": torch.randint(3, 50, (1, 9))}


def _decoder_of_a_stream(config: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (1, LENGTH))
    return {"input_ids": ids, "encoder_hidden_states": _stream()}


def _stream() -> Tensor:
    return torch.randn(1, 7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def _sounds(config: Any) -> dict[str, Tensor]:
    features = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": torch.randint(3, 50, (1, 9))}


def _wave(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(1, 160, dtype=torch.float64)}


def _translator(name: str, **changes: Any) -> Any:
    settings = {
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 50,
        "decoder_start_token_id": 1,
        **_SPECIAL,
    }
    return getattr(transformers, name)(**(settings | changes))


def _t5(name: str) -> Any:
    # The inner width is not d_model/heads.
    return getattr(transformers, name)(
        d_model=48,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        d_ff=64,
        vocab_size=50,
        decoder_start_token_id=0,
    )


def _speech(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(
        hidden_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        **changes,
    )


def _modernbert(name: str, **changes: Any) -> Any:
    return small(name, num_hidden_layers=4, local_attention=6, cls_token_id=1, sep_token_id=2, **(_SPECIAL | changes))


def _t5_bias(side: str, own: bool) -> Callable[[nn.Module, int], Tensor]:
    """The bias of the first layer, or each layer's own."""

    def bias(model: nn.Module, layer: int) -> Tensor:
        attention: Any = model.get_submodule(f"{side}.block.{layer if own else 0}.layer.0.SelfAttention")
        length = LENGTH if side == "encoder" else 9
        with torch.no_grad():
            return attention.compute_bias(length, length)[0]

    return bias


def _mpnet_bias(model: Any, layer: int) -> Tensor:
    with torch.no_grad():
        return model.encoder.compute_position_bias(torch.zeros(1, LENGTH, 48))[0]


def _of_t5(name: str, own_bias: bool = False) -> list[Family]:
    common: dict[str, Any] = {
        "config": lambda: _t5(f"{name}Config"),
        "model": f"{name}ForConditionalGeneration",
        "inputs": _both_sides,
    }
    return [
        Family(
            name=f"{name} {stack}",
            block=f"{side}.block.{{layer}}.layer.{number}",
            attention=f"{side}.block.{{layer}}.layer.{number}.{module}",
            stack=stack,
            patterns=patterns,
            source="encoder" if number else None,
            bias=None if number else _t5_bias(side, own_bias),
            **common,
        )
        for stack, side, number, module, patterns in (
            ("encoder", "encoder", 0, "SelfAttention", "encoder_attentions"),
            ("decoder", "decoder", 0, "SelfAttention", "decoder_attentions"),
            ("decoder cross", "decoder", 1, "EncDecAttention", "cross_attentions"),
        )
    ]


def _of_translator(
    name: str, model: str, pre: bool, inputs: Callable[..., Any] = _both_sides, **changes: Any
) -> list[Family]:
    found = []
    for stack, side, module, patterns in (
        ("encoder", "encoder", "self_attn", "encoder_attentions"),
        ("decoder", "decoder", "self_attn", "decoder_attentions"),
        ("decoder cross", "decoder", "encoder_attn", "cross_attentions"),
    ):
        attention = f"model.{side}.layers.{{layer}}.{module}"
        found.append(
            Family(
                name=f"{name} {stack}",
                config=lambda: _translator(f"{name}Config", **changes),
                model=model,
                block=f"{attention}_layer_norm" if pre else attention,
                attention=attention,
                stack=stack,
                inputs=inputs,
                source="model.encoder" if module == "encoder_attn" else None,
                patterns=patterns,
            )
        )
    return found


def _of_clip(name: str) -> list[Family]:
    config: dict[str, Any] = {
        "config": lambda: _two_towers(f"{name}Config"),
        "model": f"{name}Model",
        "inputs": _text_and_pixels,
    }
    return [
        Family(
            name=f"{name} {stack}",
            block=f"{stack}_model.encoder.layers.{{layer}}",
            attention=f"{stack}_model.encoder.layers.{{layer}}.self_attn",
            stack=stack,
            patterns=f"{stack}_model_output.attentions",
            **config,
        )
        for stack in ("text", "vision")
    ]


_TOWER: dict[str, Any] = {"block": "encoder.layers.{layer}", "attention": "encoder.layers.{layer}.self_attn"}
_SPEECH: dict[str, Any] = {
    "block": "encoder.layers.{layer}",
    "attention": "encoder.layers.{layer}.attention",
    "inputs": _wave,
}
_VIT: dict[str, Any] = {"block": "layers.{layer}", "attention": "layers.{layer}.attention", "inputs": _pixels}
_MODERN: dict[str, Any] = {"block": "layers.{layer}", "attention": "layers.{layer}.attn", "layers": range(4)}

FAMILIES = [
    *(
        Family(name, lambda name=name, extra=extra: small(f"{name}Config", **extra), f"{name}Model", **_BERT)
        for name, extra in (
            ("Bert", {}),
            ("Roberta", {}),
            ("Electra", {"embedding_size": 16}),
            ("Camembert", {}),
            ("XLMRoberta", {}),
            ("Ernie", {}),
            ("Data2VecText", {}),
            ("RemBert", {"input_embedding_size": 16}),
        )
    ),
    Family("Bert decoder", lambda: small("BertConfig", is_decoder=True), "BertModel", **_BERT),
    Family(
        "DistilBert",
        lambda: transformers.DistilBertConfig(dim=48, n_heads=4, n_layers=2, hidden_dim=64, vocab_size=50),
        "DistilBertModel",
        "transformer.layer.{layer}",
        "transformer.layer.{layer}.attention",
    ),
    Family(
        "Albert in groups",
        lambda: small("AlbertConfig", embedding_size=16, num_hidden_groups=2),
        "AlbertModel",
        "encoder.albert_layer_groups.{layer}",
        "encoder.albert_layer_groups.{layer}.albert_layers.0.attention.dense",
    ),
    Family(
        "MPNet",
        lambda: small("MPNetConfig"),
        "MPNetModel",
        "encoder.layer.{layer}",
        "encoder.layer.{layer}.attention.attn",
        bias=_mpnet_bias,
    ),
    Family("ModernBert", lambda: _modernbert("ModernBertConfig"), "ModernBertModel", **_MODERN),
    Family(
        "ModernBert with biases",
        lambda: _modernbert("ModernBertConfig", attention_bias=True, norm_bias=True),
        "ModernBertModel",
        **_MODERN,
    ),
    Family("ModernBert decoder", lambda: _modernbert("ModernBertDecoderConfig"), "ModernBertDecoderModel", **_MODERN),
    *_of_t5("T5"),
    *_of_t5("MT5"),
    *_of_t5("UMT5", own_bias=True),
    *_of_translator("Bart", "BartForConditionalGeneration", pre=False),
    *_of_translator("Marian", "MarianMTModel", pre=False),
    *_of_translator("MBart", "MBartForConditionalGeneration", pre=True),
    *_of_translator("Pegasus", "PegasusForConditionalGeneration", pre=True),
    *_of_translator("M2M100", "M2M100ForConditionalGeneration", pre=True),
    *_of_translator(
        "Whisper",
        "WhisperForConditionalGeneration",
        pre=True,
        inputs=_sounds,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        begin_suppress_tokens=None,
    ),
    *(
        Family(name, lambda name=name, extra=extra: _vision(f"{name}Config", **extra), f"{name}Model", **_VIT)
        for name, extra in (("ViT", {}), ("DeiT", {}), ("ViTMSN", {}))
    ),
    Family("ViT without biases", lambda: _vision("ViTConfig", qkv_bias=False), "ViTModel", **_VIT),
    Family(
        "Dinov2",
        lambda: _vision("Dinov2Config", mlp_ratio=2),
        "Dinov2Model",
        "encoder.layer.{layer}",
        "encoder.layer.{layer}.attention",
        inputs=_pixels,
    ),
    *_of_clip("CLIP"),
    *_of_clip("Siglip"),
    *(
        Family(
            f"{name} alone",
            lambda name=name: small(f"{name}Config", **_SPECIAL),
            f"{name}Model",
            stack="text",
            **_TOWER,
        )
        for name in ("CLIPText", "SiglipText")
    ),
    *(
        Family(
            f"{name} alone",
            lambda name=name: _vision(f"{name}Config"),
            f"{name}Model",
            stack="vision",
            inputs=_pixels,
            **_TOWER,
        )
        for name in ("CLIPVision", "SiglipVision")
    ),
    Family(
        "CLIP text with its projection",
        lambda: small("CLIPTextConfig", **_SPECIAL),
        "CLIPTextModelWithProjection",
        "text_model.encoder.layers.{layer}",
        "text_model.encoder.layers.{layer}.self_attn",
        stack="text",
    ),
    Family("Wav2Vec2", lambda: _speech("Wav2Vec2Config"), "Wav2Vec2Model", **_SPEECH),
    Family(
        "Wav2Vec2 norm in front",
        lambda: _speech("Wav2Vec2Config", do_stable_layer_norm=True),
        "Wav2Vec2Model",
        **_SPEECH,
    ),
    Family("Hubert", lambda: _speech("HubertConfig"), "HubertModel", **_SPEECH),
]
CROSS_BERT = Family(
    "Bert cross",
    lambda: small("BertConfig", is_decoder=True, add_cross_attention=True),
    "BertModel",
    "encoder.layer.{layer}.crossattention",
    "encoder.layer.{layer}.crossattention.output.dense",
    stack="cross",
    inputs=_decoder_of_a_stream,
    patterns="cross_attentions",
)
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attention_from_the_weights_alone_is_the_model_s_own(family, tmp_path):
    prove(family, tmp_path)


def test_a_bert_that_reads_another_stream_crosses_to_it(tmp_path):
    model = build(CROSS_BERT)
    extracted = read(model, tmp_path, "cross")
    assert [weights.layer for weights in extracted] == [0, 1]
    seen = run(CROSS_BERT, model)
    for weights in extracted:
        assert_same(weights, CROSS_BERT, model, replace(seen[weights.layer], source=_stream()[0]))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_and_shapes_alone_tell_the_same_weights(family, tmp_path):
    model = build(family)
    told = read(model, tmp_path, family.stack)
    # A tower of CLIP by itself does not tell which of the two it is.
    stack = "" if family.name.endswith("alone") else family.stack
    found = read_by_names(model, tmp_path, stack, told[0].heads)
    assert [weights.layer for weights in found] == list(family.layers)
    for one, other in zip(told, found, strict=True):
        for name in (*NAMES, *BIASES):
            torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=0, atol=0)


def test_names_that_two_families_share_leave_the_norm_open_until_one_is_asked_for(tmp_path):
    build(BY_NAME["MBart encoder"]).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    found = {
        family: next(open_checkpoint(tmp_path, family=family, heads=4).layers()) for family in (None, "bart", "mbart")
    }
    assert "norm" in found[None].facts.unknown
    assert "norm" not in found["bart"].facts.unknown
    assert found["bart"].norm is None
    assert found["mbart"].norm is not None
    torch.testing.assert_close(found["bart"].qk("folded").dense(), found[None].qk().dense())


def test_heads_that_nothing_tells_are_asked_for(tmp_path):
    with pytest.raises(QkovError, match=r"this is BERT.*nothing tells its number of heads: give --heads"):
        read_by_names(build(BY_NAME["Bert"]), tmp_path, "")


@pytest.mark.parametrize(
    ("name", "role", "flipped"),
    [
        ("Bert", "Q", "(d_head head) d_model"),
        ("Bert", "Q", "d_model (head d_head)"),
        ("Bert", "K", "(d_head head) d_model"),
        ("Bert", "V", "d_model (head d_head)"),
        ("Bert", "O", "(head d_head) d_model"),
        ("Bert", "O", "d_model (d_head head)"),
        ("ModernBert", "QKV", "(head qkv d_head) d_model"),
        ("ModernBert", "QKV", "(qkv d_head head) d_model"),
        ("T5 decoder cross", "V", "(d_head head) d_model"),
    ],
)
def test_another_layout_is_another_attention(name, role, flipped, tmp_path):
    family = BY_NAME[name]
    model: Any = build(family)
    model.save_pretrained(tmp_path)
    (mapping,) = (each for each in open_checkpoint(tmp_path).stacks if each.stack == family.stack)
    seen = run(family, model)
    for layouts, agrees in ((mapping.layouts, True), (mapping.layouts | {role: flipped}, False)):
        weights = next(open_checkpoint(tmp_path, replace(mapping, layouts=layouts)).layers())
        if agrees:
            assert_same(weights, family, model, seen[0])
        else:
            with pytest.raises(AssertionError, match="not close"):
                assert_same(weights, family, model, seen[0])


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "used_by"),
    [(4, 1, 1, 4), (4, 2, 1, 2), (2, 1, 2, 2), (4, 2, 3, 2), (3, 2, 1, 1)],
)
def test_layers_that_share_their_weights_are_measured_once(layers, groups, inner, used_by, tmp_path):
    shared = {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    model: Any = transformers.AlbertModel(small("AlbertConfig", embedding_size=16, **shared))
    found = read(model, tmp_path, "")
    assert [weights.layer for weights in found] == list(range(groups * inner))
    for weights in found:
        group, of_group = divmod(weights.layer, inner)
        query = model.encoder.albert_layer_groups[group].albert_layers[of_group].attention.query.weight
        torch.testing.assert_close(weights.W_Q, query.detach().unflatten(0, (4, 12)).mT, rtol=0, atol=0)
        assert weights.facts.used_by == used_by
        # Three layers in two groups: one group serves two of them, and the config does not say so of each.
        assert ("used_by" in weights.facts.unknown) == bool(layers % groups)


@pytest.mark.parametrize("name", ["ViT", "Dinov2"])
def test_a_running_vision_model_calls_its_tensors_otherwise(name, tmp_path):
    model = build(BY_NAME[name])
    (saved := tmp_path / "saved").mkdir()
    told = read(model, saved, "")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    found = list(open_checkpoint(tmp_path / "model.pt").layers())
    assert [weights.layer for weights in found] == [0, 1]
    for one, other in zip(told, found, strict=True):
        torch.testing.assert_close(other.qk("folded").dense(), one.qk("folded").dense(), rtol=0, atol=0)
        torch.testing.assert_close(other.ov("folded").dense(), one.ov("folded").dense(), rtol=0, atol=0)


#: Configs as they lie beside older weights, of tiny size.
OLD_CONFIGS = {
    "ModernBert": {
        "model_type": "modernbert",
        "attention_bias": False,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 120000.0,
        "hidden_size": 48,
        "intermediate_size": 64,
        "local_attention": 8,
        "local_rope_theta": 5000.0,
        "max_position_embeddings": 32,
        "norm_eps": 1e-4,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 50,
        "pad_token_id": 0,
    },
    "ModernBert decoder": {
        "model_type": "modernbert-decoder",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 50,
        "pad_token_id": 0,
    },
    "T5 encoder": {
        "model_type": "t5",
        "d_ff": 64,
        "d_kv": 8,
        "d_model": 48,
        "layer_norm_epsilon": 1e-4,
        "n_positions": 512,
        "num_heads": 4,
        "num_layers": 2,
        "relative_attention_num_buckets": 32,
        "vocab_size": 50,
    },
    "CLIP text": {
        "model_type": "clip",
        "projection_dim": 16,
        "text_config": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50},
        "vision_config": {"hidden_size": 48, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4},
    },
    "Siglip text": {
        "model_type": "siglip",
        "text_config": {"model_type": "siglip_text_model", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 50},
        "vision_config": {"hidden_size": 48, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4},
    },
    "Whisper encoder": {
        "model_type": "whisper",
        "d_model": 48,
        "decoder_attention_heads": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_layers": 2,
        "num_mel_bins": 8,
        "pad_token_id": 0,
        "vocab_size": 50,
    },
    "ViT": {
        "model_type": "vit",
        "hidden_size": 48,
        "image_size": 8,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "patch_size": 4,
    },
    "ViTMSN": {
        "model_type": "vit_msn",
        "hidden_size": 48,
        "image_size": 8,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "patch_size": 4,
    },
    "Wav2Vec2": {
        "model_type": "wav2vec2",
        "do_stable_layer_norm": True,
        "layer_norm_eps": 1e-4,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    },
}


@pytest.mark.parametrize("name", OLD_CONFIGS)
def test_an_older_config_tells_what_transformers_reads_from_it(name, tmp_path):
    config = BY_NAME[name].config().from_dict(OLD_CONFIGS[name])
    getattr(transformers, BY_NAME[name].model)(config).save_pretrained(tmp_path)
    told = list(open_checkpoint(tmp_path).layers())
    (tmp_path / "config.json").write_text(json.dumps(OLD_CONFIGS[name]))
    found = list(open_checkpoint(tmp_path).layers())
    assert [(weights.stack, weights.layer, weights.heads) for weights in found] == [
        (weights.stack, weights.layer, weights.heads) for weights in told
    ]
    for one, other in zip(told, found, strict=True):
        assert other.facts == one.facts
        assert other.facts.unknown == frozenset()
        assert (other.norm is None) == (one.norm is None)
        if one.norm is not None and other.norm is not None:
            assert (other.norm.kind, other.norm.eps) == (one.norm.kind, one.norm.eps)
