"""A probe counts whole calls that ran alone; the table and the card say in words which calls it left out."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from torch import nn

from .plain_measures import assert_table, plain_measures
from .test_watching_leaves_no_trace import IDS, llama

OTHER = IDS + 20
FAILED = "1 call ended by an error, and is not counted"


def measured(*calls: torch.Tensor) -> dict[str, Any]:
    """The measures of whole calls, from what the model itself returns."""
    with torch.no_grad():
        outputs = [llama()(ids, output_attentions=True).attentions for ids in calls]
    maps = [torch.cat(layers) for layers in zip(*outputs, strict=True)]
    mask = torch.ones(len(maps[0]), 6, dtype=torch.bool)
    wanted = plain_measures(maps, mask, torch.zeros_like(mask))
    return {name: values for name, values in wanted.items() if "relevant" not in name and "chance" not in name}


def demand_partial(probe: AttentionProbe, words: str) -> None:
    assert set(probe.table()["partial"]) == {words}
    assert f"partial: {words}" in probe._repr_html_()
    assert repr(probe).endswith(f"partial: {words})")


def fails_in_the_second_layer(model: Any) -> None:
    def fail(*_given: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(IDS)
    handle.remove()


def is_interrupted_after_the_last_layer(model: Any) -> None:
    def interrupt(*_given: Any) -> None:
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    handle.remove()


def has_a_mask_that_the_probe_refuses(model: Any) -> None:
    with pytest.raises(CallError, match="values other than 0 and 1"):
        model(IDS, torch.full_like(IDS, 2))


@pytest.mark.parametrize(
    "failing", [fails_in_the_second_layer, is_interrupted_after_the_last_layer, has_a_mask_that_the_probe_refuses]
)
def test_a_call_that_fails_in_the_middle_is_left_out_and_said(failing: Callable[[Any], None]):
    model = llama()
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(OTHER)
        assert "partial" not in probe.table()
        failing(model)
    demand_partial(probe, FAILED)
    assert_table(probe.table(), measured(OTHER))
    probe.reset()
    with torch.no_grad(), probe:
        model(OTHER)
    assert "partial" not in probe.table()
    assert "partial" not in probe._repr_html_()


def test_where_only_a_call_failed_the_error_says_so():
    model = llama()
    with torch.no_grad(), AttentionProbe(model) as probe:
        fails_in_the_second_layer(model)
    with pytest.raises(CallError, match=f"nothing was measured; .*; {FAILED}$"):
        probe.table()


def meeting(model: Any) -> Any:
    """Let two threads meet inside the first layer of the model, so that their calls overlap; return the hook."""
    barrier = threading.Barrier(2, timeout=120)

    def wait(*_given: Any) -> None:
        barrier.wait()

    return model.model.layers[0].register_forward_hook(wait)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        with torch.no_grad():
            results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_threads_at_once_compute_as_ever_and_their_calls_are_left_out_and_said():
    model = llama()
    with torch.no_grad():
        plain = [model(ids).logits for ids in (IDS, OTHER)]
    with AttentionProbe(model) as probe:
        handle = meeting(model)
        outputs = in_threads(lambda: model(IDS).logits, lambda: model(OTHER).logits)
        handle.remove()
        with pytest.raises(CallError, match="2 calls ran at once in several threads, and are not counted"):
            probe.table()
        with torch.no_grad():
            model(OTHER)
    for output, wanted in zip(outputs, plain, strict=True):
        assert torch.equal(output, wanted)
    demand_partial(probe, "2 calls ran at once in several threads, and are not counted")
    assert_table(probe.table(), measured(OTHER))


def test_threads_one_after_another_are_whole():
    model = llama()
    with AttentionProbe(model) as probe:
        for ids in (IDS, OTHER):
            in_threads(lambda ids=ids: model(ids))
    assert "partial" not in probe.table()
    assert_table(probe.table(), measured(IDS, OTHER))


def test_a_call_inside_a_call_counts_and_the_outer_one_is_left_out():
    model = llama()
    depth: list[int] = []

    def call_again(*_given: Any) -> None:
        if not depth:
            depth.append(1)
            model(OTHER)

    model.model.layers[0].register_forward_hook(call_again)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(IDS)
    demand_partial(probe, "1 call had another call of the model inside, and is not counted")
    assert_table(probe.table(), measured(OTHER))


def test_a_call_that_is_not_over_when_the_block_ends_is_left_out():
    model = llama()
    begun, may_end = threading.Event(), threading.Event()

    def wait(*_given: Any) -> None:
        begun.set()
        assert may_end.wait(120)

    probe = AttentionProbe(model)
    with probe:
        with torch.no_grad():
            model(OTHER)
        handle = model.model.layers[0].register_forward_hook(wait)
        thread = threading.Thread(target=lambda: model(IDS))
        thread.start()
        assert begun.wait(120)
    may_end.set()
    thread.join()
    handle.remove()
    demand_partial(probe, "1 call had not ended when the probe stopped watching, and is not counted")
    assert_table(probe.table(), measured(OTHER))


def test_a_failing_layer_of_torch_is_said_too():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.fails = False

        def forward(self, vectors: torch.Tensor) -> torch.Tensor:
            written, _ = self.attention(vectors, vectors, vectors)
            if self.fails:
                raise ValueError("not finite")
            return written

    torch.manual_seed(0)
    model, vectors = Block().eval(), torch.randn(2, 3, 8)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(vectors)
        model.fails = True
        with pytest.raises(ValueError, match="not finite"):
            model(vectors)
    demand_partial(probe, FAILED)
    assert set(probe.table()["queries"]) == {6}
