"""A small transformer of attention alone, in float64 and the plainest way, as the measures see a model."""

from typing import Any

import torch
from qkov.analyses.attention import AttentionModel, Batch
from qkov.analyses.tasks import Example
from qkov.circuits import AttentionFacts, AttentionWeights

VOCABULARY, PAD = 11, 0


class ToyAttention(AttentionModel):
    """Attention with a residual stream, no positions and no norms, which classifies or, as told, predicts everywhere.

    It is read at the last token if it is causal, and at the first if it is not.
    """

    name, classifies, context, pad, mask_token = "toy", True, None, PAD, None

    def __init__(self, layers=3, heads=4, causal=True, key_value_heads=None, d_model=8, d_head=3, clip=None, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        kv = key_value_heads or heads
        self.layers, self.heads, self.causal = layers, heads, causal
        self.embedding, self.unembedding = drawn(VOCABULARY, d_model), drawn(d_model, 3)
        self.clip = clip
        self.blocks: list[dict[str, Any]] = [
            {
                "W_Q": drawn(heads, d_model, d_head) / 4,
                "W_K": drawn(kv, d_model, d_head) / 4,
                "W_V": drawn(kv, d_model, d_head) / 4,
                "W_O": drawn(heads, d_head, d_model) / 4,
                "b_V": drawn(kv, d_head),
            }
            for _ in range(layers)
        ]

    def logits(self, tokens, mask, *, maps=None, inputs=None, embedded=None, token_types=None):
        self.demand_no_token_types(token_types)
        stream = self.embed(tokens) if embedded is None else embedded
        hidden = ~mask[:, None, None, :]
        if self.causal:
            hidden = hidden | torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for layer, block in enumerate(self.blocks):
            if inputs is not None:
                inputs(layer, stream)
            queries, keys, values = (
                torch.einsum("bnm,hmd->bhnd", stream, W).repeat_interleave(self.heads // len(W), dim=1)
                for W in (block["W_Q"], block["W_K"], block["W_V"])
            )
            values = values + block["b_V"].repeat_interleave(self.heads // len(block["b_V"]), dim=0)[:, None]
            if self.clip is not None:
                values = values.clamp(-self.clip, self.clip)
            attention = (queries @ keys.mT).masked_fill(hidden, -torch.inf).softmax(dim=-1)
            if maps is not None:
                maps(layer, attention)
            stream = stream + torch.einsum("bhqk,bhkd,hdm->bqm", attention, values, block["W_O"])
        logits = stream @ self.unembedding
        return logits[torch.arange(len(tokens)), self.readout(mask)] if self.classifies else logits

    def embed(self, tokens):
        return self.embedding[tokens]

    def readout(self, mask):
        return mask.sum(dim=1) - 1 if self.causal else torch.zeros(len(mask), dtype=torch.long)

    def attention_weights(self):
        facts = AttentionFacts(clip_qkv=self.clip, causal=self.causal)
        return [AttentionWeights(layer=layer, **block, facts=facts) for layer, block in enumerate(self.blocks)]


def kept_maps(model, batch):
    """Every layer's map of the batch, as the model gives it."""
    maps = {}
    with torch.no_grad():
        model.logits(batch.tokens, batch.mask, maps=maps.__setitem__)
    return list(maps.values())


def batch_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return Batch.of([Example(tuple(tokens), label=0) for tokens in drawn], pad=PAD)
