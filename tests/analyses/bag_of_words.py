"""A classifier whose probabilities are in closed form: the sum of its tokens' weights, through a sigmoid."""

import torch
from qkov.analyses.attention import AttentionModel
from qkov.circuits import CallError


class BagOfWords(AttentionModel):
    """p(class 1) = sigmoid(sum of the weights of the tokens that are seen); it knows no order and reads nowhere.

    It counts the inputs that it is given.
    """

    name, layers, heads, causal, context, pad, classifies = "bag of words", 0, 0, False, None, 0, True

    def __init__(self, weights, mask_token=None, reads_first=False):
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.mask_token, self.reads_first = mask_token, reads_first
        self.inputs = []

    def logits(self, tokens, mask, *, embedded=None, **_sinks):
        self.inputs += [tuple(row[seen].tolist()) for row, seen in zip(tokens, mask, strict=True)]
        vectors = self.embed(tokens) if embedded is None else embedded
        total = (vectors @ self.weights * mask).sum(dim=1)
        return torch.stack([torch.zeros_like(total), total], dim=1)

    def embed(self, tokens):
        return torch.nn.functional.one_hot(tokens, len(self.weights)).double()

    def readout(self, mask):
        if not self.reads_first:
            raise CallError(f"{self.name} reads all {mask.shape[1]} positions")
        return torch.zeros(len(mask), dtype=torch.long)

    def attention_weights(self):
        return []
