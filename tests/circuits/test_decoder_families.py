"""Decoders of transformers: attention from the extracted weights alone is the model's own."""

import pytest

from .decoders import FAMILIES
from .family_proof import prove


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attention_from_the_weights_alone_is_the_model_s_own(family, tmp_path):
    prove(family, tmp_path)
