"""A probe as a list of TransformerLens' hooks beside the user's own, on bridges, raw and in compatibility mode."""

from typing import Any

import pytest
import torch
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from torch import nn

from ..analyses.test_transformer_lens_models import CHOSEN, bridge
from ..circuits.test_transformer_lens import EXAMPLES, bridge_of, build
from .beside_hooks import CHECKS, IDS


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("tiny", CHOSEN, ids=lambda tiny: tiny.name)
def test_raw(tiny, check, tmp_path):
    check(bridge(tiny.build(), tmp_path))


@pytest.mark.parametrize("check", CHECKS)
def test_in_compatibility_mode(check, tmp_path):
    check(bridge_of(build(EXAMPLES[0]), tmp_path, fold_ln=True))


def test_a_model_without_hook_points_is_refused():
    model: Any = nn.MultiheadAttention(8, 2)
    with pytest.raises(CallError, match=r"^MultiheadAttention has no hook points of TransformerLens; use the probe as"):
        _ = AttentionProbe(model).fwd_hooks


def test_errors_name_the_hook_point(tmp_path):
    model = bridge(CHOSEN[0].build(), tmp_path)
    probe = AttentionProbe(model, maps=[(0, 9)])
    message = r"the map of head 9 was asked for; blocks\.0\.attn\.hook_pattern of TransformerBridge has heads 0 to 3"
    with torch.no_grad(), pytest.raises(CallError, match=message):
        model.run_with_hooks(IDS, fwd_hooks=probe.fwd_hooks)
