"""Decoders of transformers: attention from the extracted weights alone is the model's own."""

from typing import Any

import pytest
import transformers

from .family_proof import Family, prove, small


def _gpt2(**changes: Any) -> Any:
    return transformers.GPT2Config(n_embd=48, n_head=4, n_layer=2, n_positions=32, vocab_size=50, **changes)


_CAUSAL = {"block": "model.layers.{layer}", "attention": "model.layers.{layer}.self_attn"}
_GPT2 = {"model": "GPT2LMHeadModel", "block": "transformer.h.{layer}", "attention": "transformer.h.{layer}.attn"}

FAMILIES = [
    Family("gpt2", _gpt2, **_GPT2),
    Family("gpt2 scores divided by layer", lambda: _gpt2(scale_attn_by_inverse_layer_idx=True), **_GPT2),
    Family("llama", lambda: small("LlamaConfig", num_key_value_heads=2), "LlamaForCausalLM", **_CAUSAL),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attention_from_the_weights_alone_is_the_model_s_own(family, tmp_path):
    prove(family, tmp_path)
