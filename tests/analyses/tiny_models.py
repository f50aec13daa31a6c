"""Tiny models of transformers, with weights of ordinary size everywhere, for tests of what reads models."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from qkov.analyses.attention.models.transformers import (
    TransformersCausalLM,
    TransformersClassifier,
    TransformersMaskedLM,
    TransformersModel,
)

VOCABULARY = 50
MASK = 7


def small(name: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }
    return getattr(transformers, name)(**(settings | changes))


def gpt2(**changes: Any) -> Any:
    names = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
    return small("GPT2Config", **({"pad_token_id": None} | names | changes))


def modern_bert(**changes: Any) -> Any:
    return small("ModernBertConfig", **({"bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 1} | changes))


def cache_name(model: Any) -> str:
    """The name of a cache in a call of the model, which newer versions of transformers have changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class Tiny:
    """A model, how it is seen, and the path of what reads the values of a layer's attention."""

    name: str
    config: Callable[[], Any]
    values: str
    causal: bool = True

    def build(self, attention: str | None = None) -> Any:
        config = self.config()
        if attention is not None:
            # In transformers 4 some classes are chosen by this when they are built, and cannot be set later.
            config._attn_implementation = attention
        torch.manual_seed(0)
        model = getattr(transformers, self.name)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model.eval()

    def adapted(self) -> TransformersModel:
        if "MaskedLM" in self.name:
            return TransformersMaskedLM(self.build(), mask_token=MASK)
        if "Sequence" in self.name:
            return TransformersClassifier(self.build())
        return TransformersCausalLM(self.build())


GROUPED = {"num_key_value_heads": 2, "head_dim": 12}
CLASSIFIERS = [
    Tiny(
        "BertForSequenceClassification",
        lambda: small("BertConfig"),
        "bert.encoder.layer.{}.attention.self.value",
        False,
    ),
    Tiny(
        "DistilBertForSequenceClassification",
        lambda: transformers.DistilBertConfig(dim=48, n_heads=4, n_layers=2, hidden_dim=64, vocab_size=VOCABULARY),
        "distilbert.transformer.layer.{}.attention.v_lin",
        False,
    ),
    Tiny(
        "DebertaV2ForSequenceClassification",
        lambda: small("DebertaV2Config", relative_attention=True, pos_att_type="p2c|c2p"),
        "deberta.encoder.layer.{}.attention.self.value_proj",
        False,
    ),
    Tiny(
        "LlamaForSequenceClassification",
        lambda: small("LlamaConfig", num_key_value_heads=2, pad_token_id=None),
        "model.layers.{}.self_attn.v_proj",
    ),
    Tiny("GPT2ForSequenceClassification", gpt2, "transformer.h.{}.attn.c_attn"),
]
CAUSAL = [
    Tiny("GPT2LMHeadModel", gpt2, "transformer.h.{}.attn.c_attn"),
    Tiny("LlamaForCausalLM", lambda: small("LlamaConfig", num_key_value_heads=2), "model.layers.{}.self_attn.v_proj"),
    Tiny(
        "MistralForCausalLM",
        lambda: small("MistralConfig", num_key_value_heads=2, sliding_window=3),
        "model.layers.{}.self_attn.v_proj",
    ),
    Tiny("Gemma2ForCausalLM", lambda: small("Gemma2Config", **GROUPED), "model.layers.{}.self_attn.v_proj"),
    Tiny(
        "GPTNeoXForCausalLM",
        lambda: small("GPTNeoXConfig", num_attention_heads=3),
        "gpt_neox.layers.{}.attention.query_key_value",
    ),
    Tiny(
        "BloomForCausalLM",
        lambda: transformers.BloomConfig(
            hidden_size=48, n_head=4, n_layer=2, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, pad_token_id=0
        ),
        "transformer.h.{}.self_attention.query_key_value",
    ),
    Tiny(
        "OPTForCausalLM",
        lambda: small("OPTConfig", ffn_dim=64, word_embed_proj_dim=48),
        "model.decoder.layers.{}.self_attn.v_proj",
    ),
]
MASKED = [
    Tiny("BertForMaskedLM", lambda: small("BertConfig"), "bert.encoder.layer.{}.attention.self.value", False),
    Tiny(
        "RobertaForMaskedLM",
        lambda: small("RobertaConfig", pad_token_id=1),
        "roberta.encoder.layer.{}.attention.self.value",
        False,
    ),
    Tiny("ModernBertForMaskedLM", modern_bert, "model.layers.{}.attn.Wqkv", False),
    Tiny(
        "AlbertForMaskedLM",
        lambda: small("AlbertConfig", embedding_size=16),
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.value",
        False,
    ),
]
TINY = [*CLASSIFIERS, *CAUSAL, *MASKED]
