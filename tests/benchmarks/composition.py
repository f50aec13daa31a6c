"""Time the Q-, K- and V-composition scores of all pairs of heads beside TransformerLens' `all_composition_scores`.

Run as `python -m tests.benchmarks.composition`. A random float32 model of GPT-2-small's shape, the same weights for
both, one after the other in one run. TransformerLens takes about 9 GB at its peak.
"""

import time
from typing import Any

import torch
from qkov.circuits import AttentionWeights, composition_scores
from transformer_lens.model_bridge.sources import native

GPT2_SMALL: dict[str, Any] = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_head": 64}


def weights_of(layer: int, attention: Any) -> AttentionWeights:
    """The weights of a layer of TransformerLens."""
    W_Q, W_K, W_V, W_O = (getattr(attention, name).detach() for name in ("W_Q", "W_K", "W_V", "W_O"))
    return AttentionWeights(layer=layer, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O)


def composition_seconds(shape: dict[str, Any]) -> dict[str, float]:
    """Return the wall time of all three kinds of score, by whose they are; the scores have to agree."""
    model = native.boot(shape | {"n_ctx": 8, "d_vocab": 11, "d_mlp": 8, "act_fn": "gelu", "seed": 0})
    layers = [weights_of(layer, block.attn) for layer, block in enumerate(model.blocks)]
    start = time.perf_counter()
    ours = composition_scores(layers)
    between = time.perf_counter()
    with torch.no_grad():
        theirs = {kind: model.all_composition_scores(kind).scores for kind in "QKV"}
    end = time.perf_counter()
    for pair in ours:
        for kind, scores in pair.scores.items():
            expected = theirs[kind][pair.earlier, :, pair.later]
            torch.testing.assert_close(scores.float(), expected, rtol=1e-3, atol=0)
    return {"qkov": between - start, "TransformerLens": end - between}


def main() -> None:
    """Print the two times."""
    seconds = composition_seconds(GPT2_SMALL)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, GPT-2-small shape, Q, K and V of all pairs")
    for whose, elapsed in seconds.items():
        print(f"{whose:<16}{elapsed:>8.2f} s{seconds['TransformerLens'] / elapsed:>8.1f}")


if __name__ == "__main__":
    main()
