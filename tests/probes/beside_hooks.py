"""What holds for a probe as TransformerLens' hooks, on every kind of model that TransformerLens has.

Each check takes a model with two layers and tokens below 50, in evaluation mode.
"""

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from qkov.probes import AttentionProbe

from .plain_measures import assert_table, plain_measures

IDS = torch.randint(8, 50, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]
RELEVANT = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.4
PADDED: dict[str, Any] = {"attention_mask": MASK.long()}
POINTS = [f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)]


def watched(model: Any) -> AttentionProbe:
    return AttentionProbe(model, relevant=RELEVANT, maps=[(0, 1), (1, 0)])


def evenly(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
    """Let head 1 look at all earlier tokens alike."""
    even = MASK[:, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
    changed = pattern.clone()
    changed[:, 1] = even / even.sum(dim=-1, keepdim=True)
    return changed


def without_head(z: torch.Tensor, hook: Any) -> torch.Tensor:
    """Take away what head 0 writes; the output of the heads has one axis for them, or they are beside each other."""
    changed = z.clone()
    changed[:, :, 0] = 0
    return changed


def patched(residual: torch.Tensor, hook: Any) -> torch.Tensor:
    """Give the last token of the first example the residual stream of the second token."""
    changed = residual.clone()
    changed[0, 8] = changed[0, 1]
    return changed


USER = [(POINTS[0], evenly), ("blocks.0.attn.hook_z", without_head), ("blocks.1.hook_resid_pre", patched)]


def patterns(model: Any, hooks: list[Any]) -> list[torch.Tensor]:
    """The patterns that the model itself caches while the user's hooks are there."""
    with model.hooks(fwd_hooks=hooks):
        _, cache = model.run_with_cache(IDS, **PADDED)
    return [cache[point] for point in POINTS]


def check_maps_are_what_the_user_s_hooks_leave_in_either_order(model: Any) -> None:
    maps, plain = patterns(model, USER), patterns(model, [])
    changed = [(one - other).abs().amax() for one, other in zip(maps, plain, strict=True)]
    assert min(changed) > 0.01
    alone = model.run_with_hooks(IDS, fwd_hooks=USER, **PADDED)
    for before in (True, False):
        probe = watched(model)
        hooks = [*probe.fwd_hooks, *USER] if before else [*USER, *probe.fwd_hooks]
        together = model.run_with_hooks(IDS, fwd_hooks=hooks, **PADDED)
        assert torch.equal(together, alone)
        assert_table(probe.table(), plain_measures(maps, MASK, RELEVANT))
        assert probe.table()["hook"].unique().tolist() == POINTS
        assert torch.equal(probe.maps[0, 1][0], maps[0][:, 1])
        assert torch.equal(probe.maps[1, 0][0], maps[1][:, 0])
        probe = watched(model)
        outer, inner = (probe.fwd_hooks, USER) if before else (USER, probe.fwd_hooks)
        with model.hooks(fwd_hooks=outer), model.hooks(fwd_hooks=inner):
            assert torch.equal(model(IDS, **PADDED), alone)
        assert_table(probe.table(), plain_measures(maps, MASK, RELEVANT))


def check_hooks_and_context_see_the_same_and_count_a_call_once(model: Any) -> None:
    by_hooks, by_context, both = watched(model), watched(model), watched(model)
    with model.hooks(fwd_hooks=[*by_hooks.fwd_hooks, *both.fwd_hooks]), by_context, both:
        for _ in range(2):
            model(IDS, **PADDED)
    table = by_context.table()
    assert set(table["queries"]) == {2 * 18}
    for probe in (by_hooks, both):
        assert probe.table().equals(table)
        assert probe.examples().equals(by_context.examples())


def check_only_calls_and_layers_whose_hooks_run_are_counted(model: Any) -> None:
    probe = watched(model)
    hooks = probe.fwd_hooks
    model(IDS, **PADDED)
    model.run_with_hooks(IDS, fwd_hooks=hooks[1:], **PADDED)
    model.run_with_cache(IDS, **PADDED)
    assert probe.table().groupby("layer")["queries"].first().to_dict() == {1: 18}
    assert probe.examples()["rollout"].isna().all()
    model.run_with_hooks(IDS, fwd_hooks=[*hooks, *probe.fwd_hooks], **PADDED)
    assert probe.table().groupby("layer")["queries"].first().to_dict() == {0: 18, 1: 36}
    for name, hook in hooks:
        model.add_hook(name, hook)
    model(IDS, **PADDED)
    model.reset_hooks()
    model(IDS, **PADDED)
    assert probe.table().groupby("layer")["queries"].first().to_dict() == {0: 36, 1: 54}


def check_a_call_that_fails_is_not_counted_and_the_next_one_is(model: Any) -> None:
    def fail(value: torch.Tensor, hook: Any) -> None:
        raise RuntimeError("the user's own mistake")

    probe = watched(model)
    for before in (True, False):
        mistake = [("blocks.1.hook_resid_post", fail)]
        hooks = [*probe.fwd_hooks, *mistake] if before else [*mistake, *probe.fwd_hooks]
        with pytest.raises(RuntimeError, match="own mistake"):
            model.run_with_hooks(IDS, fwd_hooks=hooks, **PADDED)
    model.reset_hooks()
    model.run_with_hooks(IDS, fwd_hooks=probe.fwd_hooks, **PADDED)
    assert_table(probe.table(), plain_measures(patterns(model, []), MASK, RELEVANT))


def check_nothing_is_left_when_the_hooks_are_gone(model: Any) -> None:
    forward, call = type(model).forward, type(model.blocks[0].attn.hook_pattern).__call__
    probe = watched(model)
    hooks = probe.fwd_hooks
    twin = copy.deepcopy(model)
    model.run_with_hooks(IDS, fwd_hooks=hooks, **PADDED)
    # A copy has hook points of its own, at which the hooks mark what nothing reads.
    twin.run_with_hooks(IDS, fwd_hooks=hooks, **PADDED)
    assert set(probe.table()["queries"]) == {18}
    del hooks
    gc.collect()
    assert type(model).forward is forward
    assert type(model.blocks[0].attn.hook_pattern).__call__ is call
    assert not any(point._forward_hooks for point in (block.attn.hook_pattern for block in model.blocks))
    model(IDS, **PADDED)
    assert set(probe.table()["queries"]) == {18}


def check_a_call_that_stops_early_gives_the_layers_that_ran(model: Any) -> None:
    probe = watched(model)
    model.run_with_hooks(IDS, fwd_hooks=probe.fwd_hooks, stop_at_layer=1, **PADDED)
    maps = patterns(model, [])
    assert_table(probe.table(), plain_measures(maps[:1], MASK, RELEVANT))


def without_gradient(check: Any) -> Any:
    named = partial(_without_gradient, check)
    return pytest.param(named, id=check.__name__.removeprefix("check_"))


def _without_gradient(check: Any, model: Any) -> None:
    with torch.no_grad():
        check(model)


#: The checks, for `pytest.mark.parametrize`.
CHECKS = [without_gradient(check) for name, check in list(globals().items()) if name.startswith("check_")]
