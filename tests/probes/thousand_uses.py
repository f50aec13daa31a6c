"""What a thousand uses of a probe leave behind, as JSON: run as `python -m tests.probes.thousand_uses`."""

import gc
import json
import tracemalloc
import weakref
from typing import Any

import torch
import transformers
from qkov.probes import AttentionProbe

#: Memory is traced over the last 2 TRACED of them, for tracing takes time, and measured over the second half.
USES, TRACED = 1000, 250


def main() -> None:
    torch.set_num_threads(1)
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=50, bos_token_id=1, eos_token_id=1)
    config._attn_implementation = "eager"
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(10).reshape(2, 5)
    relevant, maps = torch.arange(5) < 2, weakref.WeakSet()
    kept = AttentionProbe(model, relevant=relevant, measures=["entropy", "sink"])

    def use(number: int) -> None:
        with AttentionProbe(model, relevant=relevant) as probe, kept:
            model(ids)
        if number % 20 == 0:
            probe.table()
        kept.reset()

    def remember(_module: Any, _args: Any, output: Any) -> None:
        maps.add(output[1])

    with torch.no_grad():
        for number in range(50):
            use(number)
        gc.collect()
        objects = len(gc.get_objects())
        for number in range(USES - 50 - 2 * TRACED):
            use(number)
        tracemalloc.start()
        for number in range(TRACED):
            use(number)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(TRACED):
            use(number)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        objects = len(gc.get_objects()) - objects
        handle = model.transformer.h[0].attn.register_forward_hook(remember)
        use(0)
        handle.remove()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    left = {"hooks": hooks + ("forward" in model.__dict__), "maps": len(maps), "objects": objects, "bytes": grown}
    print(json.dumps(left))


if __name__ == "__main__":
    main()
