"""TransformerLens' names as addresses: what they stand for, their checkpoints, and what is refused."""

import logging

import pytest
from qkov.circuits import CallError, QkovError, find_checkpoints, open_checkpoint
from qkov.circuits.storage import lens
from qkov.circuits.storage.lens import lens_checkpoints, lens_model
from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

ATTN_ONLY = "NeelNanda/Attn_Only_2L512W_C4_Code"


def test_every_name_of_its_tables_is_the_model_that_it_says():
    names = {alias: official for official in OFFICIAL_MODEL_NAMES for alias in MODEL_ALIASES.get(official, ())}
    for name in ("pythia-70m", "gpt2-small", "attn-only-2l", "EleutherAI/pythia-70m", "GPT2-Small"):
        assert name.lower() in {known.lower() for known in (*names, *OFFICIAL_MODEL_NAMES)}
    for name in [*list(names)[::40], "pythia-70m", "gpt2-small", "attn-only-2l"]:
        assert lens_model(f"lens:{name}").official == names[name]
    assert lens_model("lens:GPT2-Small").official == "gpt2"
    assert lens_model("lens:attn-only-2l").official == ATTN_ONLY


def test_checkpoints_are_those_of_its_list_at_the_revisions_that_it_loads():
    handlers = logging.root.handlers[:]
    listed, unit = lens_checkpoints(lens_model("lens:pythia-70m"))
    assert unit == "step"
    assert [model.label for model in listed][:12] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert (len(listed), listed[-1].label) == (154, 143000)
    found = find_checkpoints("lens:pythia-70m")
    assert [checkpoint.step for checkpoint in found] == [model.label for model in listed]
    assert found[11].address == "hf://EleutherAI/pythia-70m@step1000"
    (one,) = find_checkpoints("lens:stanford-gpt2-small-a@400000")
    assert (one.step, one.address) == (400000, "hf://stanford-crfm/alias-gpt2-small-x21@checkpoint-400000")
    # A warning about the names of Pythia would otherwise give the root logger a handler.
    assert logging.root.handlers == handlers
    assert logging.root.manager.disable == 0


def test_the_revisions_are_those_that_transformer_lens_itself_would_load():
    helpers = pytest.importorskip("transformer_lens.model_bridge.sources.transformers.helpers")
    for name in ("pythia-70m", "stanford-gpt2-small-a"):
        for model in lens_checkpoints(lens_model(f"lens:{name}"))[0][::40]:
            assert model.revision == helpers._resolve_checkpoint_to_revision(model.official, None, model.label)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "lens:pythia-70n",
            r"TransformerLens knows no model 'pythia-70n'; names like it are pythia-70m, .*has no lens:$",
        ),
        ("lens:zzzz", r"knows no model 'zzzz'; expected a name such as pythia-70m or gpt2-small"),
        ("lens:pythia-70m@final", r"lens:pythia-70m@final should end in the label of a checkpoint, such as @1000"),
        (
            "lens:pythia-70m@3",
            r"lens:pythia-70m@3 is not listed by TransformerLens, which lists 154 checkpoints of EleutherAI/pythia-70m"
            r", from step 0 to 143000",
        ),
        ("lens:gpt2-small", r"lists no checkpoints of gpt2-small \(gpt2\), so there is no run to follow; qkov inspect"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(call, message):
    with pytest.raises(CallError, match=message) as refused:
        find_checkpoints(call)
    assert "\n" not in str(refused.value)


def test_patterns_for_the_checkpoints_are_refused_beside_a_name():
    for options in ({"revisions": "step*"}, {"step": "step{step}"}):
        with pytest.raises(
            CallError, match="TransformerLens lists the checkpoints of lens:pythia-70m with their steps"
        ):
            find_checkpoints("lens:pythia-70m", **options)


def test_without_the_hub_the_line_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for call in ("lens:attn-only-2l", "lens:attn-only-2l@100"):
        with pytest.raises(QkovError, match=f"HF_HUB_OFFLINE is set, so the hub cannot be queried for {ATTN_ONLY}"):
            find_checkpoints(call)
    with pytest.raises(QkovError, match=r"HF_HUB_OFFLINE is set, so the hub cannot be queried for gpt2"):
        open_checkpoint("lens:gpt2-small")


def test_its_own_format_is_read_by_nothing_else():
    message = rf"^lens:attn-only-2l \({ATTN_ONLY}\) is in TransformerLens' own format, which only TransformerLens reads"
    with pytest.raises(CallError, match=message):
        open_checkpoint("lens:attn-only-2l")


def test_a_file_of_another_checkpoint_is_not_taken_for_the_one_that_is_named(monkeypatch):
    files = ["checkpoints/attn_100.pth", "checkpoints/attn_1200.pth", "checkpoints/attn_200.pth", "model_final.pth"]
    monkeypatch.setattr(lens, "files_in", lambda _name: files)
    for label in (100, 1200):
        model = lens.LensModel("attn-only-2l", ATTN_ONLY, label)
        assert model.hub_address() == f"hf://{ATTN_ONLY}/checkpoints/attn_{label}.pth"
        model.demand_own_file()
    assert lens.LensModel("attn-only-2l", ATTN_ONLY).hub_address() == f"hf://{ATTN_ONLY}/model_final.pth"
    named = lens.LensModel("attn-only-2l", ATTN_ONLY, 200)
    assert named.hub_address() == f"hf://{ATTN_ONLY}/checkpoints/attn_200.pth"
    with pytest.raises(QkovError, match=r"ends in 200\.pth, which is checkpoints/attn_1200\.pth, that of another"):
        named.demand_own_file()
