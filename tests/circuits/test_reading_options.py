"""Reading options: one object or keywords, never both, and the same wherever something is opened."""

import pytest
import torch
from qkov.analyses.trajectories import circuit_table, track
from qkov.circuits import CallError, Mapping, ReadingOptions, open_checkpoint, open_model, read_mapping
from qkov.probes import CircuitProbe, CircuitRates, circuit_parameter_groups

HEADS = 2
FAMILY = "torch_attention"


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.attention = torch.nn.MultiheadAttention(8, HEADS, kdim=8, vdim=6)
    return model


@pytest.fixture
def path(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def layer(source):
    (weights,) = source.layers()
    return weights


def test_an_object_and_keywords_say_the_same(path, model):
    options = ReadingOptions(heads=HEADS)
    for opened in (open_checkpoint(path, options), open_checkpoint(path, heads=HEADS)):
        assert layer(opened).W_Q.shape == (HEADS, 8, 4)
    for opened in (open_model(model, ReadingOptions(heads=4)), open_model(model, heads=4)):
        assert layer(opened).W_Q.shape == (4, 8, 2)


def test_a_mapping_may_stand_for_the_options(path, tmp_path):
    (tmp_path / "map.toml").write_text(
        'layout = "linear"\nheads = 2\n[tensors]\nQ = "attention.q_proj_weight"\nK = "attention.k_proj_weight"\n'
    )
    mapping = read_mapping(tmp_path / "map.toml")
    assert isinstance(mapping, Mapping)
    by_mapping = layer(open_checkpoint(path, mapping))
    by_options = layer(open_checkpoint(path, ReadingOptions(mapping)))
    assert torch.equal(by_mapping.W_Q, by_options.W_Q)


def calls(path, model, store):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "open_checkpoint": lambda **options: open_checkpoint(path, **options),
        "open_model": lambda **options: open_model(model, **options),
        "track": lambda **options: track(path, store, **options),
        "circuit_table": lambda **options: circuit_table(path, **options),
        "CircuitProbe": lambda **options: CircuitProbe(model, **options),
        "CircuitRates": lambda **options: CircuitRates(optimizer, model, **options),
        "circuit_parameter_groups": lambda **options: circuit_parameter_groups(model, 0.1, **options),
    }


@pytest.mark.parametrize("name", calls(None, torch.nn.Linear(1, 1), None))
def test_both_forms_everywhere_and_refused_together(name, path, model, tmp_path):
    call = calls(path, model, tmp_path / "store")[name]
    with pytest.raises(CallError, match="options are given beside heads; state everything in one of the two forms"):
        call(options=ReadingOptions(family=FAMILY), heads=HEADS)
    with pytest.raises(CallError, match="there is no family 'none'"):
        call(options=ReadingOptions(family="none"))
    with pytest.raises(CallError, match="there is no family 'none'"):
        call(family="none")
    with pytest.raises(CallError, match=r"unexpected keyword 'head'; .* are mapping, family, heads, prefix"):
        call(head=HEADS)
    call(options=ReadingOptions(family=FAMILY, heads=HEADS))


def test_models_in_memory_have_no_pickle_to_trust(model):
    with pytest.raises(CallError, match="unexpected keyword 'trust_pickle'"):
        open_model(model, trust_pickle=True)  # pyright: ignore[reportCallIssue]
    # The same options may open a file and a model.
    open_model(model, ReadingOptions(trust_pickle=True))


def test_what_is_open_takes_no_options(path):
    with pytest.raises(CallError, match="the source is already open"):
        circuit_table(open_checkpoint(path, heads=HEADS), heads=HEADS)
