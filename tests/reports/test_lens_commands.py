"""The commands on names of TransformerLens, against a server that answers like the hub: figures, bytes, errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from ..analyses.word_tokens import word_tokeniser
from ..circuits.range_server import serving
from ..imitated_hub import lay_out_hub, list_files

PYTHIA, GPT2 = "EleutherAI/pythia-70m", "openai-community/gpt2"
OWN = "NeelNanda/Attn_Only_2L512W_C4_Code"
HEADS, WIDTH, D_HEAD = 2, 16, 8
#: Runs each call, with three of Pythia's 154 checkpoints listed, and prints its status and what it printed.
SCRIPT = """
import contextlib, io, json, sys
from qkov.circuits.storage import lens
from qkov.reports.commands.main import run
lens._listing().__globals__["PYTHIA_CHECKPOINTS"][:] = [0, 1, 2]
for call in json.loads(sys.argv[1]):
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = run(call)
    print(json.dumps([status, printed.getvalue(), said.getvalue()]))
"""
CALLS = {
    "inspect": "inspect lens:pythia-70m --json",
    "inspect in words": "inspect lens:pythia-70m",
    "inspect old name": "inspect lens:gpt2-small",
    "inspect own format": "inspect lens:attn-only-2l",
    "track": "track lens:pythia-70m --out pythia",
    "track again by another name": "track lens:EleutherAI/pythia-70m --out pythia",
    "track own format": "track lens:attn-only-2l --out own --json",
    "audit": "audit lens:pythia-70m",
    "compare": "compare lens:attn-only-2l@100 lens:attn-only-2l@1200 --out compared",
    "explain": "explain lens:pythia-70m@1 lines --data posts.jsonl --out explained --json",
    "explain own format": "explain lens:attn-only-2l lines --data posts.jsonl --out own-explained --json",
    "unknown": "track lens:pythia-70n",
    "not listed": "track lens:gpt2-small",
    "options": "track lens:attn-only-2l --heads 2 --out other",
}


def gpt_neox(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPTNeoXConfig(
        hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=60
    )
    model = transformers.GPTNeoXForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def own_format(seed: int) -> dict[str, torch.Tensor]:
    """A state dict as the repositories of TransformerLens' author hold them."""
    torch.manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.W_E": (60, WIDTH),
        "pos_embed.W_pos": (32, WIDTH),
        "unembed.W_U": (WIDTH, 60),
    }
    for layer in (0, 1):
        at = f"blocks.{layer}.attn."
        shapes |= {f"{at}W_{side}": (HEADS, WIDTH, D_HEAD) for side in "QKV"} | {f"{at}W_O": (HEADS, D_HEAD, WIDTH)}
        shapes |= {f"{at}b_{side}": (HEADS, D_HEAD) for side in "QKV"} | {f"{at}b_O": (WIDTH,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def lay_out(folder: Path) -> None:
    files = lay_out_hub(folder, PYTHIA, branches=["main", "step0", "step1", "step2"], tags=[])
    for seed, (revision, place) in enumerate(files.items()):
        model = gpt_neox(seed)
        if revision == "step2":
            model.config.save_pretrained(place)
            torch.save(model.state_dict(), place / "pytorch_model.bin")
        else:
            model.save_pretrained(place)
        word_tokeniser().save_pretrained(place)
    list_files(folder, PYTHIA, files)
    files = lay_out_hub(folder, GPT2, branches=["main"], tags=[])
    settings: Any = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 1}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).save_pretrained(files["main"])
    list_files(folder, GPT2, files)
    # The hub knows the old name, and answers with the new one.
    old = folder / "api" / "models" / "gpt2"
    old.mkdir()
    (old / "index.html").write_text(json.dumps({"id": GPT2, "sha": files["main"].resolve().name}))
    files = lay_out_hub(folder, OWN, branches=["main"], tags=[])
    config = {"d_model": WIDTH, "n_layers": 2, "d_mlp": 64, "d_head": D_HEAD, "n_heads": HEADS, "n_ctx": 32}
    config |= {
        "d_vocab": 60,
        "act_fn": "solu_ln",
        "attn_only": True,
        "normalization": "LNPre",
        "tokenizer_name": PYTHIA,
    }
    (files["main"] / "config.json").write_text(json.dumps(config))
    (files["main"] / "checkpoints").mkdir()
    for label in (100, 200, 1200):
        torch.save(own_format(label), files["main"] / "checkpoints" / f"attn-only-2l_{label}.pth")
    torch.save(own_format(1), files["main"] / "model_final.pth")
    list_files(folder, OWN, files)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> dict[str, Any]:
    """What every call printed, the folder in which it worked, and what the hub sent."""
    hub, work = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("work")
    lay_out(hub)
    posts = [{"tokens": words.split(), "relevant": [0, 1, 0, 0, 0]} for words in ("the key near the doors",) * 2]
    (work / "posts.jsonl").write_text("\n".join(map(json.dumps, posts)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    with serving(hub) as (address, traffic):
        traffic.is_hub = True
        traffic.codes = {"/tree/": "EntryNotFound", "/resolve/": "EntryNotFound", "/revision/": "RevisionNotFound"}
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps([call.split() for call in CALLS.values()])],
            env=inherited | settings | {"HF_ENDPOINT": address},
            cwd=work,
            capture_output=True,
            text=True,
            check=True,
        )
    answers = [json.loads(line) for line in finished.stdout.splitlines()]
    return dict(zip(CALLS, answers, strict=True)) | {"work": work, "hub": hub, "traffic": traffic}


def products_of_neox(seed: int) -> dict[tuple[int, str, int], np.ndarray]:
    """W_QK and W_OV in float64 from the fused projection, whose rows are (head, qkv, d_head)."""
    found = {}
    for layer, block in enumerate(gpt_neox(seed).gpt_neox.layers):
        fused = block.attention.query_key_value.weight.detach().double().numpy()
        W_Q, W_K, W_V = np.moveaxis(fused.reshape(HEADS, 3, D_HEAD, WIDTH), 1, 0)
        W_O = block.attention.dense.weight.detach().double().numpy().reshape(WIDTH, HEADS, D_HEAD)
        for head in range(HEADS):
            found[layer, "QK", head] = W_K[head].T @ W_Q[head]
            found[layer, "OV", head] = W_O[:, head] @ W_V[head]
    return found


def products_of_own(label: int) -> dict[tuple[int, str, int], np.ndarray]:
    state = {name: tensor.double().numpy() for name, tensor in own_format(label).items()}
    found = {}
    for layer in (0, 1):
        W_Q, W_K, W_V, W_O = (state[f"blocks.{layer}.attn.W_{side}"] for side in "QKVO")
        for head in range(HEADS):
            found[layer, "QK", head] = W_K[head] @ W_Q[head].T
            found[layer, "OV", head] = (W_V[head] @ W_O[head]).T
    return found


def assert_figures(store: Path, step: int, products: dict[tuple[int, str, int], np.ndarray]) -> None:
    rows = pd.read_parquet(store / "steps").query("step == @step")
    assert len(rows) == len(products) == 8
    for row in rows.to_dict("records"):
        product = products[row["layer"], row["circuit"], row["head"]]
        assert row["frobenius_norm"] == pytest.approx(np.linalg.norm(product), rel=1e-6)
        assert row["spectral_norm"] == pytest.approx(np.linalg.norm(product, 2), rel=1e-6)


def test_a_name_stands_for_the_model_on_the_hub(done):
    status, printed, _ = done["inspect"]
    assert status == 0
    facts = json.loads(printed)
    assert facts["address"] == f"hf://{PYTHIA}/model.safetensors"
    _, printed, _ = done["inspect in words"]
    lines = printed.splitlines()
    assert lines[0] == f"lens:pythia-70m: {PYTHIA} on the hub, which is hf://{PYTHIA}"
    assert lines[1] == "  TransformerLens lists 3 checkpoints of it, step 0 to 2: qkov track lens:pythia-70m"
    status, printed, _ = done["inspect old name"]
    assert status == 0
    assert f"gpt2 on the hub, which is hf://{GPT2}" in printed
    assert "TransformerLens lists no checkpoints of it" in printed
    status, printed, _ = done["inspect own format"]
    assert status == 0
    assert "recognised by TransformerLens' weight interface" in printed
    assert "W_Q: blocks.{layer}.attn.W_Q, axes head d_model d_head" in printed
    assert "LayerNorm in front of attention, without a gain" in printed


def test_its_checkpoints_are_followed_by_range_and_through_transformer_lens(done):
    status, printed, said = done["track"]
    assert status == 0
    assert all(line.startswith("track: ") for line in said.splitlines())
    assert "measured 3 checkpoints, kept 0" in printed
    for step in (0, 1, 2):
        assert_figures(done["work"] / "pythia", step, products_of_neox(step + 1))
    described = json.loads((done["work"] / "pythia" / "run.json").read_text())
    # The name that was typed last.
    assert described["source"] == "lens:EleutherAI/pythia-70m"
    assert [each["uri"] for each in described["checkpoints"]] == [f"hf://{PYTHIA}@step{step}" for step in (0, 1, 2)]
    assert {each["step_origin"] for each in described["checkpoints"]} == {"TransformerLens' list"}


def test_of_safetensors_only_the_attention_weights_are_sent(done):
    # Two calls of track and one of audit asked for step 0; each fetched header and attention weights at most once.
    path = f"/{PYTHIA}/resolve/step0/model.safetensors"
    content = (done["hub"] / path[1:]).read_bytes()
    header = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + header])
    attention = [
        entry["data_offsets"] for name, entry in table.items() if ".attention." in name or "input_layer" in name
    ]
    needed = sum(stop - start for start, stop in attention)
    sent = done["traffic"].sent[path]
    assert 2 * needed <= sent <= 3 * (needed + 8 + header) < 1.5 * len(content)


def test_a_store_knows_the_model_by_all_its_names(done):
    status, printed, _ = done["track again by another name"]
    assert status == 0
    assert "measured 0 checkpoints, kept 3" in printed


def test_its_own_format_is_loaded_by_transformer_lens_and_never_from_another_file(done):
    status, printed, said = done["track own format"]
    facts = json.loads(printed)
    assert (status, facts["measured"]) == (1, [100, 1200])
    for label in (100, 1200):
        assert_figures(done["work"] / "own", label, products_of_own(label))
    message = (
        f"lens:attn-only-2l@200 cannot be read: TransformerLens loads the first file of {OWN} that ends in 200.pth, "
        "which is checkpoints/attn-only-2l_1200.pth, that of another checkpoint"
    )
    assert facts["left_out"] == {"attn-only-2l_200.pth": message}
    assert message in said


def test_the_other_commands_take_the_names_too(done):
    assert done["audit"][0] == 0
    assert done["audit"][1].startswith("Checked 3 checkpoints, step 0 to 2: no two are identical")
    assert done["compare"][0] == 0
    changes = pd.read_parquet(done["work"] / "compared" / "changes.parquet")
    before, after = products_of_own(100), products_of_own(1200)
    for row in changes.to_dict("records"):
        at = (row["layer"], row["circuit"], row["head"])
        expected = np.linalg.norm(after[at] - before[at]) / np.linalg.norm(before[at])
        assert row["relative_change"] == pytest.approx(expected, rel=1e-6)
    for call, name in (("explain", "EleutherAI/pythia-70m@step1"), ("explain own format", "lens:attn-only-2l")):
        status, printed, _ = done[call]
        assert status == 0
        assert json.loads(printed)["model"] == name


def test_errors_are_one_line(done):
    for call, status, message in (
        ("unknown", 2, r"qkov: TransformerLens knows no model 'pythia-70n'; names like it are pythia-70m"),
        ("not listed", 2, r"qkov: TransformerLens lists no checkpoints of gpt2-small \(gpt2\)"),
        ("options", 2, r"qkov: lens:attn-only-2l@100 has no safetensors, so TransformerLens loads it"),
    ):
        assert done[call][0] == status
        assert re.match(message, done[call][2].splitlines()[-1])
        assert "Traceback" not in done[call][2]
