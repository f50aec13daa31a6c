"""`qkov compare`: the change of each head between two models, as text, JSON, tables and a report."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from qkov.analyses.trajectories import compare_models
from qkov.reports.commands.main import run


def write_pair(folder: Path, layers: int = 2, heads: int = 2) -> None:
    """Two models of which the second was changed in its last layer, most of all in its last head."""
    config = transformers.GPT2Config(
        n_layer=layers, n_head=heads, n_embd=8 * heads, vocab_size=50, bos_token_id=1, eos_token_id=1
    )
    torch.manual_seed(0)
    model: Any = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder / "base")
    weight = model.transformer.h[-1].attn.c_attn.weight
    with torch.no_grad():
        weight += 0.001 * torch.randn_like(weight)
        weight[:, 8 * (heads - 1) : 8 * heads] *= 2
    model.save_pretrained(folder / "tuned")


@pytest.fixture
def pair(tmp_path, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(tmp_path)
    write_pair(Path("pair"))
    capsys.readouterr()
    return tmp_path


def test_the_change_of_each_head_is_printed_and_written(pair, capsys):
    # R15
    assert run(["compare", "pair/base", "pair/tuned"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = pd.read_parquet("qkov-tuned-against-base/changes.parquet")
    pd.testing.assert_frame_equal(
        table.drop(columns=["base", "tuned"]), compare_models("pair/base", "pair/tuned").table, check_dtype=False
    )
    largest = table.query("circuit == 'QK'")["relative_change"].max()
    assert re.fullmatch(
        rf"The largest change of W_QK is in layer 1, head 1: {100 * largest:.0f} % of its norm; "
        r"the median over 4 heads is \S+ %\.",
        lines[0],
    )
    assert lines[1].startswith("The largest change of W_OV is in layer 1, head ")
    assert lines[2:] == [
        "Layer 0 is identical to the bit, biases included.",
        "table: qkov-tuned-against-base/changes.parquet",
        "report: qkov-tuned-against-base/report.html",
    ]
    page = Path("qkov-tuned-against-base/report.html").read_text()
    assert lines[0].replace("W_QK", "W<sub>QK</sub>") in page
    assert page.count('role="img"') == 6
    assert "qkov-tuned-against-base/changes.parquet" in page


def test_track_of_two_models_without_steps_points_to_compare(pair, capsys):
    assert run(["track", "pair"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("if they are two models, qkov compare BASE TUNED compares them")
    write_pair(Path("more"))
    Path("more/tuned").rename("pair/third")
    capsys.readouterr()
    assert run(["track", "pair"]) == 2
    assert "qkov compare" not in capsys.readouterr().err


def test_json_holds_every_head_and_has_no_nan(pair, capsys):
    assert run(["compare", "pair/base", "pair/tuned", "--json", "--output", "changes.csv", "--out", "here"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result["identical_layers"] == ["0"]
    assert len(result["heads"]) == 8
    assert result["heads"][0]["relative_change"] == 0
    assert result["heads"][0]["change_stable_rank"] is None
    assert (result["table"], result["report"]) == ("changes.csv", "here/report.html")
    assert len(pd.read_csv("changes.csv")) == 8
    assert not Path("here/changes.parquet").exists()


def test_a_model_with_itself_has_a_report_as_well(pair, capsys):
    assert run(["compare", "pair/base", "pair/base", "--out", "same"]) == 0
    assert "All 2 layers are identical to the bit" in capsys.readouterr().out
    page = Path("same/report.html").read_text()
    assert "Nothing to draw: no head changed." in page
    assert "Which heads changed most?" not in page


def test_only_the_measures_that_were_asked_for_are_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pair(Path("pair"), layers=3, heads=20)
    assert run(["compare", "pair/base", "pair/tuned", "--measure", "relative_change", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert Path(result["report"]).read_text().count('role="img"') == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["compare", "pair/base"], "Missing argument 'tuned'"),
        (["compare", "pair/base", "pair/none"], "pair/none"),
        (["compare", "pair/base", "pair/tuned", "--measure", "spectral"], "--measure should be one of relative_change"),
        (["compare", "pair/base", "pair/tuned", "--output", "changes.xlsx"], "should end in .parquet or .csv"),
        (["compare", "pair/base", "pair/tuned", "--basis", "cooked"], "basis should be one of"),
        (["compare", "pair/base", "other/tuned"], "pair/base/model.safetensors has layers 0 and 1 and .* has layer 0;"),
        (["compare", "pair/base", "wide/tuned"], "layer 0 does not compare: the number of heads is 2 in .* and 3 in"),
    ],
)
def test_a_wrong_call_is_one_line_with_status_2_and_writes_nothing(pair, capsys, arguments, named):
    write_pair(Path("other"), layers=1)
    write_pair(Path("wide"), heads=3)
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(named, line), line
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("width", [1200, 390])
def test_the_report_is_no_wider_than_the_window(pair, capsys, chromium, width):
    assert run(["compare", "pair/base", "pair/tuned"]) == 0
    page = Path("qkov-tuned-against-base/report.html")
    measured = page.with_name("measured.html")
    measured.write_text(
        page.read_text()
        + "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    )
    shown = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"),
            *(f"--window-size={width},1000", measured.resolve().as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    found = re.search(r"<title>(\d+) of (\d+)</title>", shown)
    assert found
    assert int(found[1]) <= int(found[2])
