"""Small models that attend by torch.nn.MultiheadAttention, as a user may write them."""

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 50, 24, 4


class TorchEncoder(nn.Module):
    """torch.nn.TransformerEncoder over tokens, with one output for each class or token of the vocabulary."""

    def __init__(self, outputs: int, *, read: str, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(32, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, outputs)
        self.read = read
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        causal = self.read in ("last", "all")
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1) if causal else None
        hidden = self.encoder(x, mask=mask, src_key_padding_mask=key_padding_mask, is_causal=causal)
        if self.read == "first":
            return self.head(hidden[:, 0])
        if self.read == "last":
            real = torch.ones_like(tokens, dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
            return self.head(hidden[torch.arange(len(tokens)), real.sum(dim=1) - 1])
        if self.read == "mean":
            return self.head(hidden.mean(dim=1))
        return self.head(hidden)


class CausalTorchForCausalLM(TorchEncoder):
    """A language model whose class says so."""

    def __init__(self, **options: float) -> None:
        super().__init__(VOCABULARY, read="all", **options)  # pyright: ignore[reportArgumentType]
