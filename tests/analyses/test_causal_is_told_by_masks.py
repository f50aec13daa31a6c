"""Whether a token sees those after it is what the masks say, not which weights happen to be 0."""

from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import load_model
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from torch import nn

from .tiny_models import small

TRIAL = torch.arange(5)[None]


def looks_at_the_first_token() -> Any:
    """A BERT whose attention is all on the first of the tokens 0 to 4: every other weight underflows to 0."""
    torch.manual_seed(0)
    config: Any = small("BertConfig", num_hidden_layers=1, num_labels=3)
    model: Any = transformers.BertForSequenceClassification(config).eval()
    model.set_attn_implementation("eager")
    attention = model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        hidden = model.bert.embeddings(TRIAL)[0]
        attention.query.weight.zero_()
        attention.query.bias.fill_(1e3)
        # The product with the first vector is largest for that vector, since layer norm gives all the same length.
        attention.key.weight.copy_(hidden[0].expand_as(attention.key.weight))
        (attended,) = model(TRIAL, output_attentions=True).attentions
    assert bool((attended.triu(1) == 0).all())
    return model


def test_an_encoder_is_not_causal_though_no_weight_is_on_later_tokens():
    assert load_model(looks_at_the_first_token()).causal is False
    with pytest.raises(CallError, match="sees those after it, so it does not predict the next one"):
        load_model(NextToken(hides=False).eval(), "causal")


def test_a_mask_that_is_true_where_a_key_is_hidden_is_read():
    torch.manual_seed(0)
    model: Any = transformers.MptForCausalLM(transformers.MptConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=60))
    assert load_model(model.eval(), "causal").causal is True
    relevant = torch.tensor([[0, 1, 0, 0, 1]])
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        model(TRIAL + 3)
        model(TRIAL + 3, attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
    # The shares of relevant tokens among those that each query sees, without padding and with.
    shares = [0, 1 / 2, 1 / 3, 1 / 4, 2 / 5, 1, 1 / 2, 1 / 3, 2 / 4]
    assert probe.table()["chance"].tolist() == pytest.approx([sum(shares) / 9] * 4, abs=1e-6)


class NextToken(nn.Module):
    """A model of torch whose weights are all on the token itself, with or without a causal mask."""

    def __init__(self, *, hides: bool) -> None:
        super().__init__()
        self.hides = hides
        self.embedding = nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 1, batch_first=True)
        self.head = nn.Linear(8, 8)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.eye(8))
            self.attention.in_proj_weight[:16] = 100 * torch.eye(8).repeat(2, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors = self.embedding(tokens)
        length = tokens.shape[1]
        mask = torch.ones(length, length).triu(1).bool() if self.hides else None
        written, _ = self.attention(vectors, vectors, vectors, attn_mask=mask)
        return self.head(vectors + written)


def test_a_causal_mask_makes_the_same_weights_causal():
    assert load_model(NextToken(hides=True).eval(), "causal").causal is True


class Unreadable(NextToken):
    """The same with a mask for each head, of which one hides later tokens and the other does not."""

    def __init__(self) -> None:
        super().__init__(hides=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        with torch.no_grad():
            self.attention.in_proj_weight.zero_()
            self.attention.in_proj_bias.zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors = self.embedding(tokens)
        length = tokens.shape[1]
        later = torch.ones(length, length).triu(1).bool()
        # Only the first head hides the tokens after the next one.
        masks = torch.stack([later, later & (torch.arange(length) > 1)]).repeat(len(tokens), 1, 1)
        written, _ = self.attention(vectors, vectors, vectors, attn_mask=masks)
        return self.head(vectors + written)


def test_a_weight_on_a_later_token_shows_that_it_is_seen_where_masks_are_not_read():
    with pytest.raises(CallError, match="sees those after it, so it does not predict the next one"):
        load_model(Unreadable().eval(), "causal")


def test_where_neither_masks_nor_weights_show_it_the_model_is_refused(monkeypatch):
    monkeypatch.setattr("qkov.analyses.attention.maps.torch_modules.seen_by_torch", lambda *_given: None)
    with pytest.raises(
        CallError, match="the masks of NextToken do not say whether a token sees those after it"
    ) as caught:
        load_model(NextToken(hides=True).eval(), "causal")
    assert "\n" not in str(caught.value)
