"""Time sufficiency and comprehensiveness of many sentences beside a plain loop over examples, rankings and cuts.

Run as `python -m tests.benchmarks.faithfulness [--sentences N] [--layers L --width W]`. Agreement sentences, a token a
word, five cuts by a ranking and by the reversed one, tokens deleted; a random GPT-2, 64 wide a head. The loop runs
transformers' model on one input at a time, without gradients. The figures of both have to agree. One thread, and
seconds of the processor's time, so that what else runs on the machine has little part in them.
"""

import argparse
import math
import time

import numpy as np
import torch
import transformers
from qkov.analyses.attention import faithfulness
from qkov.analyses.attention.models.transformers import TransformersCausalLM
from qkov.analyses.attention.rationales.perturbation import ERASER_CUTS
from qkov.analyses.tasks import Example, TextExample
from qkov.analyses.tasks.agreement.sentences import agreement_sentences


def sentences(count: int) -> list[Example]:
    """Agreement sentences, each word a token."""
    words: dict[str, int] = {}

    def ids(text: str) -> tuple[int, ...]:
        return tuple(words.setdefault(word, len(words)) for word in text.split())

    return [
        Example(
            tokens=ids(one.text),
            label=one.label,
            continuations=tuple(ids(form) for form in one.continuations),
            id=one.id,
        )
        for one in agreement_sentences(count).examples
        if isinstance(one, TextExample)
    ]


def plain_loop(model: transformers.GPT2LMHeadModel, examples: list[Example], rows: list[torch.Tensor]) -> np.ndarray:
    """Return comprehensiveness and sufficiency of every example, ranking and cut, by one run of the model for each."""

    def probability(tokens: list[int], continuation: tuple[int, ...]) -> float:
        logits = model(torch.tensor([[*tokens, *continuation[:-1]]])).logits[0].log_softmax(-1)
        return math.exp(sum(float(logits[len(tokens) - 1 + n, token]) for n, token in enumerate(continuation)))

    found = []
    with torch.no_grad():
        for example, row in zip(examples, rows, strict=True):
            tokens = list(example.tokens)
            last = len(tokens) - 1
            whole = [probability(tokens, continuation) for continuation in example.continuations]
            chosen = int(np.argmax(whole))
            for weights in (-row.numpy(), row.numpy()):
                ranked = np.argsort(weights[:last], kind="stable").tolist()
                for cut in ERASER_CUTS:
                    first = set(ranked[: max(1, math.ceil(round(cut * last, 9)))])
                    without = [token for place, token in enumerate(tokens) if place not in first]
                    alone = [token for place, token in enumerate(tokens) if place in first or place == last]
                    pair = [probability(one, example.continuations[chosen]) for one in (without, alone)]
                    found.append([whole[chosen] - one for one in pair])
    return np.array(found)


def main() -> None:
    """Print both times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    examples = sentences(given.sentences)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.rand(len(one.tokens), dtype=torch.float64, generator=generator) for one in examples]
    words = {token for one in examples for tokens in (one.tokens, *one.continuations) for token in tokens}
    lengths = [len(one.tokens) for one in examples]
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=max(words) + 1,
            n_positions=64,
            n_embd=given.width,
            n_layer=given.layers,
            n_head=given.width // 64,
        )
    ).eval()
    adapter = TransformersCausalLM(model)
    faithfulness(adapter, examples[:20], {"any": rows[:20]}, draws=0)
    plain_loop(model, examples[:20], rows[:20])
    start = time.process_time()
    table = faithfulness(adapter, examples, {"any": rows}, draws=0).table
    ours = time.process_time() - start
    start = time.process_time()
    expected = plain_loop(model, examples, rows)
    loop = time.process_time() - start
    np.testing.assert_allclose(table[["comprehensiveness", "sufficiency"]], expected, atol=1e-6)
    print(
        f"torch {torch.__version__}, one thread, {given.layers} layers of {given.width}, {len(examples)} sentences of"
    )
    print(f"{min(lengths)} to {max(lengths)} words, {len(expected)} cuts; largest difference of the figures")
    print(f"{np.abs(table[['comprehensiveness', 'sufficiency']].to_numpy() - expected).max():.1e}")
    print(f"plain loop   {loop:8.2f} s")
    print(f"faithfulness {ours:8.2f} s   {loop / ours:.1f} times as fast")


if __name__ == "__main__":
    main()
