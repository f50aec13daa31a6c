"""Time and memory of a probe beside the model's forward alone and beside run_with_cache of all patterns.

Run as `python -m tests.benchmarks.attention_probe [repeats]`, on Linux. A random model of GPT-2 small's shape, one
sequence of 256 tokens, float32, without gradients; every streamed measure with a relevant mask. The model is that of
transformers with eager attention, and the bridge of TransformerLens around one. Ways of calling it take turns on one
thread; times are those of the processor, which other work on the machine moves least, and a ratio is the median of the
ratios within a turn. Memory is the peak of a process of its own above what it holds before the call, less that of the
forward alone, with a vocabulary of 1,000: the logits of the whole one are larger than a layer's maps and would hide
them. What a layer of GPT-2 itself needs may hide them as well, so it is also measured where there is nothing but maps.
The bridge keeps every pattern of its last call by itself, so that a cache of them costs it no more.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from qkov.probes import AttentionProbe
from tokenizers import Tokenizer, models
from torch import nn

from .memory import printed_in_a_process, rise

TOKENS, LAYERS, HEADS, VOCABULARY = 256, 12, 12, 50257
LAYER_MAP_BYTES = 4 * HEADS * TOKENS**2


def gpt2_small(vocabulary: int = VOCABULARY) -> Any:
    """A random model of GPT-2 small's shape with eager attention."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config).eval()


@contextlib.contextmanager
def bridged(vocabulary: int) -> Iterator[Any]:
    """The same in TransformerLens' bridge, booted offline."""
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gpt2_small(vocabulary)
        model.config.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
        yield TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu").eval()


class BareMaps(nn.Module):
    """Gives as many maps as GPT-2 small, one after the other, and holds one at a time."""

    def __init__(self) -> None:
        """Make a hook point for each layer."""
        super().__init__()
        self.blocks: Any = nn.ModuleList(
            nn.ModuleDict({"attn": nn.ModuleDict({"hook_pattern": nn.Identity()})}) for _ in range(LAYERS)
        )

    def forward(self, ids: torch.Tensor) -> None:
        """Hand the maps to the hook points."""
        for block in self.blocks:
            block["attn"]["hook_pattern"](torch.full((1, HEADS, ids.shape[1], ids.shape[1]), 1 / ids.shape[1]))


def tokens() -> torch.Tensor:
    """One sequence."""
    return torch.randint(0, 1000, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def ways(model: Any) -> dict[str, Callable[[], object]]:
    """Ways of calling a model, by name."""
    ids, relevant = tokens(), torch.arange(TOKENS) % 7 == 0

    def probed() -> None:
        with AttentionProbe(model, relevant=relevant):
            model(ids)

    found: dict[str, Callable[[], object]] = {"forward alone": lambda: model(ids), "AttentionProbe": probed}
    if hasattr(model, "run_with_cache"):
        is_pattern: Callable[[str], bool] = lambda name: name.endswith("hook_pattern")  # noqa: E731
        found["run_with_cache of all patterns"] = lambda: model.run_with_cache(ids, names_filter=is_pattern)
    elif hasattr(model, "config"):
        found["output_attentions=True"] = lambda: model(ids, output_attentions=True)
    return found


@contextlib.contextmanager
def opened(kind: str, vocabulary: int = VOCABULARY) -> Iterator[Any]:
    """The model of transformers, or the bridge."""
    if kind == "bridge":
        with bridged(vocabulary) as model:
            yield model
    elif kind == "maps":
        yield BareMaps()
    else:
        yield gpt2_small(vocabulary)


def times(kind: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, turn by turn."""
    with opened(kind) as model, torch.no_grad():
        called = ways(model)
        seconds: dict[str, list[float]] = {name: [] for name in called}
        for turn in range(repeats + 2):
            for name, call in called.items():
                start = time.process_time()
                call()
                # The first turns warm caches and thread pools.
                if turn > 1:
                    seconds[name].append(time.process_time() - start)
    return seconds


def print_peak(kind: str, way: str) -> None:
    """Print how far the peak of one call rises above what is held before."""
    with opened(kind, 1000) as model, torch.no_grad():
        called = ways(model)
        # Scratch that a first call takes for good.
        called[way]()
        called[way]()
        print(rise(called[way]))


def peak(kind: str, way: str) -> int:
    """The rise of one way's peak, in a process of its own."""
    return printed_in_a_process("tests.benchmarks.attention_probe", "--peak", kind, way)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=15)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.peak:
        print_peak(*given.peak)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.repeats} repeats; {TOKENS} tokens")
    print(f"{'':<46}{'ms':>8}{'of forward':>12}{'MiB more':>10}{'layer maps':>12}")
    for kind in ("transformers", "bridge"):
        seconds = times(kind, given.repeats)
        alone = peak(kind, "forward alone")
        for way, found in seconds.items():
            ratio = statistics.median(one / base for one, base in zip(found, seconds["forward alone"], strict=True))
            more = 0 if way == "forward alone" else peak(kind, way) - alone
            print(
                f"{kind + ', ' + way:<46}{1000 * statistics.median(found):>8.1f}{ratio:>12.3f}"
                f"{more / 2**20:>10.1f}{more / LAYER_MAP_BYTES:>12.2f}"
            )
    more = peak("maps", "AttentionProbe") - peak("maps", "forward alone")
    print(f"{'nothing but maps, AttentionProbe':<66}{more / 2**20:>10.1f}{more / LAYER_MAP_BYTES:>12.2f}")


if __name__ == "__main__":
    main()
