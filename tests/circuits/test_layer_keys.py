"""A layer has one name in messages and one short name in lists."""

import pytest
from qkov.circuits import AttentionWeights
from qkov.circuits.weights.layer_keys import layer_label, layer_name


@pytest.mark.parametrize(
    ("stack", "name", "label"), [("", "layer 3", "3"), ("decoder cross", "decoder cross layer 3", "decoder cross 3")]
)
def test_a_layer_s_name_and_label(stack, name, label):
    assert layer_name(stack, 3) == name
    assert layer_label(stack, 3) == label


def test_weights_are_named_alike():
    assert AttentionWeights(2, stack="encoder").label == "encoder layer 2"
