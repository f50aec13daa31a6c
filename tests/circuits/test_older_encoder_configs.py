"""Configs as they lie beside older encoders and encoder-decoders say what transformers reads from them."""

import json

import pytest
import transformers
from qkov.circuits import open_checkpoint

from .encoder_decoders import FAMILIES as ENCODER_DECODERS
from .encoders import FAMILIES as ENCODERS

BY_NAME = {family.name: family for family in (*ENCODERS, *ENCODER_DECODERS)}

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
