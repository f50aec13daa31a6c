"""Attention of HookedTransformer, which TransformerLens 3.9 is the last to have: the same as the model of transformers.

It needs an environment of its own and is not collected with the other tests.
"""

from functools import partial
from typing import Any

import pytest
import torch
from qkov.analyses.attention import predictions
from qkov.analyses.attention.models.transformer_lens import HookedModel
from qkov.analyses.attention.models.transformers import TransformersCausalLM
from qkov.analyses.tasks import Example

from ..circuits.test_transformer_lens import EXAMPLES, build
from .hooked_transformer import BY_NAME, hooked

pytestmark = pytest.mark.filterwarnings("ignore")
assert_same = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


#: The others' configs are written out in these tests as far as attention goes, and no further.
CONVERTED = [example for example in EXAMPLES if example.model not in BY_NAME]


@pytest.fixture(params=CONVERTED, ids=lambda example: example.model)
def example(request):
    return request.param


def test_maps_inputs_logits_and_predictions_are_those_of_transformers(example, tmp_path):
    tokens = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]
    own = TransformersCausalLM(build(example))
    model: Any = HookedModel(hooked(build(example), tmp_path))
    found: dict[str, dict[int, torch.Tensor]] = {"maps": {}, "inputs": {}}
    wanted: dict[str, dict[int, torch.Tensor]] = {"maps": {}, "inputs": {}}
    with torch.no_grad():
        logits = model.logits(tokens, mask, **{kind: kept.__setitem__ for kind, kept in found.items()})
        expected = own.logits(tokens, mask, **{kind: kept.__setitem__ for kind, kept in wanted.items()})
        again = model.logits(tokens, mask, embedded=model.embed(tokens))
    assert_same(logits[mask].log_softmax(dim=-1), expected[mask].log_softmax(dim=-1))
    assert_same(again, logits)
    for layer in range(own.layers):
        assert_same(found["inputs"][layer][mask], wanted["inputs"][layer][mask])
        for row, length in enumerate((9, 6, 3)):
            place = (row, slice(None), slice(length), slice(length))
            assert_same(found["maps"][layer][place], wanted["maps"][layer][place])
    asked = [Example(tokens=(9, 10, 11), continuations=((20, 21), (30,))), Example(tokens=(12, 13, 14, 15, 16))]
    for one, other in zip(predictions(model, asked), predictions(own, asked), strict=True):
        assert_same(one, other)


def test_gradients_reach_the_maps(tmp_path):
    model = HookedModel(hooked(build(EXAMPLES[0]), tmp_path))
    tokens, mask = torch.full((1, 5), 9), torch.ones(1, 5, dtype=torch.bool)
    maps: dict[int, torch.Tensor] = {}
    embedded = model.embed(tokens).detach().requires_grad_()
    logits = model.logits(tokens, mask, maps=maps.__setitem__, embedded=embedded)
    first, last = torch.autograd.grad(logits[0, -1, 0], list(maps.values()))
    assert first.any()
    assert (last.abs().sum(dim=(0, 1, 3)) > 0).tolist() == [False] * 4 + [True]
