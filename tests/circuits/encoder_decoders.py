"""Tiny encoder-decoders of transformers, and where their attention is."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .family_proof import LENGTH, SPECIAL_TOKENS, Family

_DECODED = 9


def both_sides(config: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 50, (1, LENGTH)), "decoder_input_ids": torch.randint(3, 50, (1, _DECODED))}


def sounds(config: Any) -> dict[str, Tensor]:
    """For Whisper, whose convolutions halve the length."""
    features = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": torch.randint(3, 50, (1, _DECODED))}


def frames(config: Any) -> dict[str, Tensor]:
    """For Speech2Text, whose convolutions halve the length twice."""
    features = torch.randn(1, 4 * LENGTH, config.input_feat_per_channel, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": torch.randint(3, 50, (1, _DECODED))}


def translator(name: str, **changes: Any) -> Any:
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
        **SPECIAL_TOKENS,
    }
    return getattr(transformers, name)(**(settings | changes))


def t5(name: str, **changes: Any) -> Any:
    # The inner width is not d_model/heads.
    return getattr(transformers, name)(
        d_model=48,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=2,
        d_ff=64,
        vocab_size=50,
        **changes,
    )


def t5_bias(side: str, own: bool) -> Callable[[nn.Module, int], Tensor]:
    """The bias of the first layer, or each layer's own."""

    def bias(model: nn.Module, layer: int) -> Tensor:
        attention: Any = model.get_submodule(f"{side}.block.{layer if own else 0}.layer.0.SelfAttention")
        length = LENGTH if side == "encoder" else _DECODED
        with torch.no_grad():
            return attention.compute_bias(length, length)[0]

    return bias


def of_t5(name: str, own_bias: bool = False, **changes: Any) -> list[Family]:
    common: dict[str, Any] = {
        "config": lambda: t5(f"{name}Config", **changes),
        "model": f"{name}ForConditionalGeneration",
        "inputs": both_sides,
    }
    return [
        Family(
            name=f"{name} {stack}",
            block=f"{side}.block.{{layer}}.layer.{number}",
            attention=f"{side}.block.{{layer}}.layer.{number}.{module}",
            stack=stack,
            patterns=patterns,
            source="encoder" if number else None,
            bias=None if number else t5_bias(side, own_bias),
            **common,
        )
        for stack, side, number, module, patterns in (
            ("encoder", "encoder", 0, "SelfAttention", "encoder_attentions"),
            ("decoder", "decoder", 0, "SelfAttention", "decoder_attentions"),
            ("decoder cross", "decoder", 1, "EncDecAttention", "cross_attentions"),
        )
    ]


def of_translator(
    name: str, model: str, pre: bool, inputs: Callable[..., Any] = both_sides, **changes: Any
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
                config=lambda: translator(f"{name}Config", **changes),
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


FAMILIES = [
    *of_t5("T5", decoder_start_token_id=0),
    *of_t5("MT5", decoder_start_token_id=0),
    *of_t5("UMT5", own_bias=True, decoder_start_token_id=0),
    *of_t5("SwitchTransformers", num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    *of_t5("Pop2Piano"),
    *of_translator("Bart", "BartForConditionalGeneration", pre=False),
    *of_translator("Marian", "MarianMTModel", pre=False),
    *of_translator("BlenderbotSmall", "BlenderbotSmallForConditionalGeneration", pre=False),
    *of_translator("PLBart", "PLBartForConditionalGeneration", pre=False),
    *of_translator("MBart", "MBartForConditionalGeneration", pre=True),
    *of_translator("Pegasus", "PegasusForConditionalGeneration", pre=True),
    *of_translator("M2M100", "M2M100ForConditionalGeneration", pre=True),
    *of_translator("Blenderbot", "BlenderbotForConditionalGeneration", pre=True),
    *of_translator(
        "Speech2Text",
        "Speech2TextForConditionalGeneration",
        pre=True,
        inputs=frames,
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=16,
        max_target_positions=16,
    ),
    *of_translator(
        "Whisper",
        "WhisperForConditionalGeneration",
        pre=True,
        inputs=sounds,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        begin_suppress_tokens=None,
    ),
]
