"""What calls with arguments of the wrong type say, as JSON: run as `python -m tests.probes.wrong_calls`."""

import json
from collections.abc import Callable
from typing import Any

import torch
import transformers
from qkov.circuits import CallError
from qkov.probes import (
    AttentionHealth,
    AttentionProbe,
    CircuitProbe,
    CircuitRates,
    LogFilter,
    circuit_parameter_groups,
)

TOKENS = torch.arange(8).reshape(2, 4)


def main() -> None:
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=50, bos_token_id=1, eos_token_id=1)
    config._attn_implementation = "eager"
    fused: Any = transformers.GPT2LMHeadModel(config)
    split: Any = torch.nn.Module()
    split.attention = torch.nn.MultiheadAttention(16, 2, kdim=8, vdim=8)
    optimizer: Any = torch.optim.SGD(fused.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def seen(**options: Any) -> None:
        with AttentionProbe(fused, **options):
            fused(TOKENS)

    def probe(**options: Any) -> CircuitProbe:
        return CircuitProbe(fused, on_error="raise", **options)

    def health(**options: Any) -> AttentionHealth:
        return AttentionHealth(fused, optimizer, **options)

    def groups(*given: Any, **options: Any) -> None:
        circuit_parameter_groups(split, *given, **options)

    calls: dict[str, Callable[[], object]] = {
        "measures": lambda: seen(measures=3),
        "rollout": lambda: seen(rollout="none"),
        "maps, one pair": lambda: seen(maps=(0, 1)),
        "maps, a number": lambda: seen(maps=3),
        "relevant": lambda: seen(relevant="the"),
        "readout": lambda: seen(readout=None),
        "every": lambda: probe(every=1.5),
        "every, steps": lambda: probe(every="epoch"),
        "start": lambda: probe(start=1.5),
        "rotary_offset": lambda: probe(rotary_offset=0.5),
        "directions": lambda: probe(directions="task"),
        "log": lambda: probe(log="wandb"),
        "log_filter": lambda: probe(log=print, log_filter="all"),
        "log_filter, heads": lambda: LogFilter(heads=[5]),  # pyright: ignore[reportArgumentType]
        "log_filter, a number": lambda: LogFilter(heads=[(5, 1.5)]),  # pyright: ignore[reportArgumentType]
        "log_filter, one name": lambda: LogFilter(medians="frobenius_norm"),
        "log_filter, names": lambda: LogFilter(largest=[3]),  # pyright: ignore[reportArgumentType]
        "mapping": lambda: probe(mapping="map.toml"),
        "options": lambda: probe(options={"heads": 2}),
        "loss": lambda: probe().step(torch.ones(3)),
        "scalar": lambda: probe().step(rate="0.1"),
        "attach": lambda: probe().attach(schedule),
        "limit": lambda: health(limit="100"),
        "horizon": lambda: health(horizon=1.5),
        "health, start": lambda: health(start=True),
        "tell": lambda: health(tell="loud"),
        "columns": lambda: probe(columns={}),
        "guard": lambda: CircuitRates(optimizer, fused, guard="100"),  # pyright: ignore[reportArgumentType]
        "guard_by": lambda: CircuitRates(optimizer, fused, guard=100, guard_by="norm"),  # pyright: ignore[reportArgumentType]
        "lr": lambda: groups("1e-3"),
        "qk": lambda: groups(1e-3, qk="30"),
        "qk of layers": lambda: groups(1e-3, qk=[30.0, 1.0]),
        "qk of a layer": lambda: groups(1e-3, qk={0: "30"}),
        "ov of no layer": lambda: groups(1e-3, ov={None: 30.0}),
        "groups, parameters": lambda: groups(1e-3, groups=list(split.parameters())),
        "groups, one group": lambda: groups(1e-3, groups={"params": list(split.parameters())}),
        "params": lambda: groups(1e-3, groups=[{"params": 3}]),
        "params, names": lambda: groups(1e-3, groups=[{"params": ["weight"]}]),
        "optimizer": lambda: CircuitRates(schedule, fused),
        "optimizers": lambda: CircuitRates([optimizer, None], fused),  # pyright: ignore[reportArgumentType]
    }
    said: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
        except CallError as error:
            said[name] = str(error)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
