"""Tiny encoders of transformers, of text, images and sounds, and where their attention is."""

from typing import Any

import torch
import transformers
from torch import Tensor

from .family_proof import LENGTH, SPECIAL_TOKENS, Family, small

_BERT: dict[str, Any] = {"block": "encoder.layer.{layer}", "attention": "encoder.layer.{layer}.attention.output.dense"}
_MODERN: dict[str, Any] = {"block": "layers.{layer}", "attention": "layers.{layer}.attn", "layers": range(4)}
_TOWER: dict[str, Any] = {"block": "encoder.layers.{layer}", "attention": "encoder.layers.{layer}.self_attn"}


def vision(name: str, **changes: Any) -> Any:
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


def two_towers(name: str) -> Any:
    config = getattr(transformers, name)
    return config(
        text_config=small(f"{name[:-6]}TextConfig", **SPECIAL_TOKENS).to_dict(),
        vision_config=vision(f"{name[:-6]}VisionConfig", num_attention_heads=3).to_dict(),
    )


def spectrogram_transformer() -> Any:
    """Three by three patches that overlap."""
    return small("ASTConfig", num_mel_bins=8, max_length=8, patch_size=4, frequency_stride=2, time_stride=2)


def pixels(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64)}


def text_and_pixels(config: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 50, (1, LENGTH))} | pixels(config)


def spectrogram(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(1, config.max_length, config.num_mel_bins, dtype=torch.float64)}


def wave(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(1, 160, dtype=torch.float64)}


def decoder_of_a_stream(config: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (1, LENGTH))
    return {"input_ids": ids, "encoder_hidden_states": stream()}


def stream() -> Tensor:
    return torch.randn(1, 7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def speech(name: str, **changes: Any) -> Any:
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


def modernbert(name: str, **changes: Any) -> Any:
    settings = {"num_hidden_layers": 4, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}
    return small(name, **(settings | SPECIAL_TOKENS | changes))


def mpnet_bias(model: Any, layer: int) -> Tensor:
    with torch.no_grad():
        return model.encoder.compute_position_bias(torch.zeros(1, LENGTH, 48))[0]


def of_clip(name: str) -> list[Family]:
    config: dict[str, Any] = {
        "config": lambda: two_towers(f"{name}Config"),
        "model": f"{name}Model",
        "inputs": text_and_pixels,
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


def tower(name: str, stack: str) -> Family:
    """One of the two of CLIP or SigLIP by itself."""
    config = small if stack == "text" else vision
    settings = SPECIAL_TOKENS if stack == "text" else {}
    inputs = None if stack == "text" else pixels
    return Family(
        f"{name} alone",
        lambda: config(f"{name}Config", **settings),
        f"{name}Model",
        stack=stack,
        inputs=inputs,
        **_TOWER,
    )


def like_bert(name: str, **changes: Any) -> Family:
    return Family(name, lambda: small(f"{name}Config", **changes), f"{name}Model", **_BERT)


def like_vit(name: str, model: str, config: Any = None, inputs: Any = pixels, **changes: Any) -> Family:
    config = config or (lambda: vision(f"{model}Config", **changes))
    return Family(name, config, f"{model}Model", "layers.{layer}", "layers.{layer}.attention", inputs=inputs)


def like_dinov2(name: str) -> Family:
    return Family(
        name,
        lambda: vision(f"{name}Config", mlp_ratio=2),
        f"{name}Model",
        "encoder.layer.{layer}",
        "encoder.layer.{layer}.attention",
        inputs=pixels,
    )


def like_wav2vec2(name: str, model: str, **changes: Any) -> Family:
    return Family(
        name,
        lambda: speech(f"{model}Config", **changes),
        f"{model}Model",
        "encoder.layers.{layer}",
        "encoder.layers.{layer}.attention",
        inputs=wave,
    )


FAMILIES = [
    like_bert("Bert"),
    like_bert("Roberta"),
    like_bert("Electra", embedding_size=16),
    like_bert("Camembert"),
    like_bert("XLMRoberta"),
    like_bert("Ernie"),
    like_bert("Data2VecText"),
    like_bert("RemBert", input_embedding_size=16),
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
        bias=mpnet_bias,
    ),
    Family("ModernBert", lambda: modernbert("ModernBertConfig"), "ModernBertModel", **_MODERN),
    Family(
        "ModernBert with biases",
        lambda: modernbert("ModernBertConfig", attention_bias=True, norm_bias=True),
        "ModernBertModel",
        **_MODERN,
    ),
    Family("ModernBert decoder", lambda: modernbert("ModernBertDecoderConfig"), "ModernBertDecoderModel", **_MODERN),
    like_vit("ViT", "ViT"),
    like_vit("ViT without biases", "ViT", qkv_bias=False),
    like_vit("DeiT", "DeiT"),
    like_vit("ViTMSN", "ViTMSN"),
    like_vit("IJepa", "IJepa"),
    like_vit("AST", "AST", spectrogram_transformer, spectrogram),
    like_dinov2("Dinov2"),
    like_dinov2("Dinov2WithRegisters"),
    *of_clip("CLIP"),
    *of_clip("Siglip"),
    tower("CLIPText", "text"),
    tower("SiglipText", "text"),
    tower("CLIPVision", "vision"),
    tower("SiglipVision", "vision"),
    Family(
        "CLIP text with its projection",
        lambda: small("CLIPTextConfig", **SPECIAL_TOKENS),
        "CLIPTextModelWithProjection",
        "text_model.encoder.layers.{layer}",
        "text_model.encoder.layers.{layer}.self_attn",
        stack="text",
    ),
    like_wav2vec2("Wav2Vec2", "Wav2Vec2"),
    like_wav2vec2("Wav2Vec2 norm in front", "Wav2Vec2", do_stable_layer_norm=True),
    like_wav2vec2("Hubert", "Hubert"),
    like_wav2vec2("UniSpeech", "UniSpeech"),
    like_wav2vec2("UniSpeechSat norm in front", "UniSpeechSat", do_stable_layer_norm=True),
]

CROSS_BERT = Family(
    "Bert cross",
    lambda: small("BertConfig", is_decoder=True, add_cross_attention=True),
    "BertModel",
    "encoder.layer.{layer}.crossattention",
    "encoder.layer.{layer}.crossattention.output.dense",
    stack="cross",
    inputs=decoder_of_a_stream,
    patterns="cross_attentions",
)
