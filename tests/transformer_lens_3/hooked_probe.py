"""A probe on HookedTransformer, which TransformerLens 3.9 is the last to have: its own patterns, and transformers'.

It needs an environment of its own and is not collected with the other tests.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformer_lens
from qkov.probes import AttentionProbe

from ..circuits.test_transformer_lens import build
from ..probes.beside_hooks import CHECKS
from ..probes.plain_measures import assert_table, plain_measures
from .hooked_attention import CONVERTED
from .hooked_transformer import hooked

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]
RELEVANT = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.4


@pytest.fixture(params=CONVERTED, ids=lambda example: example.model)
def example(request):
    return request.param


def test_the_table_is_that_of_its_patterns_and_of_transformers(example, tmp_path):
    model: Any = hooked(build(example), tmp_path)
    own = build(example)
    own.set_attn_implementation("eager")
    with torch.no_grad():
        with AttentionProbe(model, relevant=RELEVANT, mask=MASK) as probe:
            model(IDS)
        _, cache = model.run_with_cache(IDS)
        with AttentionProbe(own, relevant=RELEVANT, mask=MASK) as other:
            own(IDS)
    maps = [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(model.cfg.n_layers)]
    window = model.cfg.window_size if getattr(model.cfg, "use_local_attn", False) else None
    assert_table(probe.table(), plain_measures(maps, MASK, RELEVANT, window=window))
    assert (probe.table()["mode"] == "training, without dropout of attention").all()
    of_hooks = probe.table().drop(columns=["mode", "hook"]).to_numpy(dtype=float)
    of_outputs = other.table().to_numpy(dtype=float)
    np.testing.assert_allclose(of_hooks, of_outputs, rtol=0, atol=1e-4)


def test_every_way_of_calling_it_is_seen_and_reset_hooks_leaves_the_probe(tmp_path):
    model: Any = hooked(build(CONVERTED[0]), tmp_path)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model.run_with_cache(IDS)
        model.reset_hooks(including_permanent=True)
        model.run_with_hooks(IDS, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda pattern, **_hook: pattern * 0)])
        model.forward(IDS)
    # What the user's own hook leaves of the first layer's pattern is no attention to count.
    table = probe.table()
    assert set(table.loc[table["layer"] == 0, "queries"]) == {54}
    assert set(table.loc[table["layer"] != 0, "queries"]) == {81}
    assert not any(block.attn.hook_pattern._forward_hooks for block in model.blocks)


@pytest.mark.parametrize("check", CHECKS)
def test_as_hooks_beside_the_user_s(example, check, tmp_path):
    check(hooked(build(example), tmp_path).eval())


def saturated(model: Any, factor: float) -> Any:
    """The same model with scores so large that most weights are exactly 0."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("W_Q", "q_norm.w")):
                weight.mul_(factor)
    return model


def test_what_a_query_can_see_is_told_by_the_mask_where_weights_are_0(example, tmp_path):
    model = saturated(hooked(build(example), tmp_path), 1e6).eval()
    left = MASK.flip(1)
    for mask in (torch.ones_like(MASK), left):
        with torch.no_grad():
            with AttentionProbe(model, relevant=RELEVANT) as probe:
                model(IDS, attention_mask=mask.long())
            _, cache = model.run_with_cache(IDS, attention_mask=mask.long())
        maps = [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(model.cfg.n_layers)]
        assert all((pattern[:, :, -1] == 0).any() for pattern in maps)
        window = model.cfg.window_size if getattr(model.cfg, "use_local_attn", False) else None
        wanted = plain_measures(maps, mask, RELEVANT, window=window)
        for name in ("chance", "chance_at_readout"):
            np.testing.assert_allclose(probe.table()[name], wanted[name].flatten(), rtol=0, atol=1e-6)


def test_an_encoder_sees_both_sides_where_weights_are_0():
    sizes = {"n_layers": 2, "d_model": 16, "n_ctx": 16, "d_head": 8, "n_heads": 2, "d_mlp": 16, "d_vocab": 50}
    # Newer versions have these names for other things.
    made: Any = transformer_lens
    config = made.HookedTransformerConfig(**sizes, act_fn="gelu", attention_dir="bidirectional", seed=0)
    model = made.HookedEncoder(config, move_to_device=False).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    saturated(model, 100)
    with torch.no_grad():
        with AttentionProbe(model, relevant=RELEVANT) as probe:
            model(IDS, one_zero_attention_mask=MASK.long())
        _, cache = model.run_with_cache(IDS, one_zero_attention_mask=MASK.long())
    maps = [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(2)]
    assert (maps[0][0, :, [0, -1]] == 0).any()
    wanted = plain_measures(maps, MASK, RELEVANT, causal=False)
    np.testing.assert_allclose(probe.table()["chance"], wanted["chance"].flatten(), rtol=0, atol=1e-6)
