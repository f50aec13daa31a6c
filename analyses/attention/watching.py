"""Running a model for what its attention does, not for what it predicts."""

import torch

from .model import AttentionModel, Batch, InputSink, MapSink


def watch(model: AttentionModel, batch: Batch, maps: MapSink, inputs: InputSink | None = None) -> None:
    """Run the model on a batch without gradients, for its maps and, where asked, what its attention reads.

    Of a language model logits are computed at one place an example where that can be had: a vocabulary is large.
    """
    with torch.no_grad():
        if model.classifies:
            model.logits(batch.tokens, batch.mask, maps=maps, inputs=inputs)
        else:
            model.logits_at(batch.tokens, batch.mask, model.reading_positions(batch)[:, None], maps=maps, inputs=inputs)
