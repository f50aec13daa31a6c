"""Text from inputs is text everywhere: in messages, on terminals, in HTML, in drawings, in tables and in file names."""

import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.inline_svg import literal
from qkov.analyses.trajectories import RunStore
from qkov.circuits import AttentionWeights, CallError, QkovError
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.circuits.visible_text import visible, visible_lines
from qkov.probes.attention.figure import draw as draw_maps
from qkov.reports.commands.main import run
from qkov.reports.drawing.heat_maps import HeatMap, draw_heat_map
from qkov.reports.drawing.panels import Panel, draw
from qkov.reports.pages.page import subscripts
from qkov.reports.terminal.progress import WorkProgress

#: The name of a folder that clears the terminal, ends the line, runs a script, turns around and breaks a formula.
EVIL = "a\x1b[2J\n<script>alert(1)<\\script>\u202e$x^{2$[/red]{{7*7}}\x9b31m"
ACTING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def write_run(folder: Path, **scalars: float) -> Path:
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        drawn = [torch.randn(2, *shape, generator=generator) for shape in ((6, 3), (6, 3), (6, 3), (3, 6))]
        save_checkpoint(folder, step, [AttentionWeights(0, *drawn)], scalars or {"loss": 1 / step}, {})
    return folder


def test_what_acts_is_shown_as_an_escape():
    assert visible("a\x1b[31m\r\nb\t\u202e\u2066\u2028\x00\ud800é𝕎") == (
        r"a\x1b[31m\r\nb\t\u202e\u2066\u2028\x00\ud800é𝕎"
    )
    assert visible_lines("שלום\u200f a\n\tb\x1b\u202e") == "שלום\u200f a\n\tb\\x1b\\u202e"
    assert visible("🧑\u200d🚀, ﷺ and Ω") == "🧑\u200d🚀, ﷺ and Ω"


@pytest.mark.parametrize("kind", [QkovError, CallError])
def test_a_message_is_one_line_whatever_it_names(kind):
    error = kind(f"{EVIL} is not there")
    assert len(str(error).splitlines()) == 1
    assert not ACTING.search(str(error))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)


def test_the_commands_print_names_as_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / EVIL)
    (tmp_path / EVIL / "tmp-\x1b[2J-checkpoint-7").mkdir()
    for command in (["inspect", EVIL], ["track", EVIL, "--out", f"out {EVIL}"], ["report", f"out {EVIL}"]):
        assert run(command) == 0, capsys.readouterr().err
        said = capsys.readouterr()
        assert not ACTING.search(said.out + said.err)
        assert r"\x1b[2J\n" in said.out
    page = (tmp_path / f"out {EVIL}" / "report.html").read_text()
    assert not ACTING.search(page)
    assert "<script>alert" not in page
    assert "{{7*7}}" in page
    assert run(["inspect", f"none {EVIL}"]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert not ACTING.search(said.err)


def test_names_in_other_encodings_are_kept_apart_from_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"run\xff")
    try:
        write_run(tmp_path / name)
    except OSError:
        pytest.skip("this file system has no such names")
    for command in (["inspect", name, "--json"], ["track", name, "--out", "store", "--json"]):
        assert run(command) == 0, capsys.readouterr().err
        json.loads(capsys.readouterr().out)
    assert set(RunStore("store").table()["source"]) == {rf"{tmp_path}/run\udcff"}
    assert r"run\udcff" in Path("store/report.html").read_text()


def test_progress_shows_names_as_text(monkeypatch, capsys):
    for terminal in ("1", ""):
        monkeypatch.setenv("FORCE_COLOR", terminal)
        with WorkProgress("track") as progress:
            progress.update(2, 2, EVIL)
        said = capsys.readouterr().err
        assert "\x1b[2J" not in said
        assert "\u202e" not in said
        assert r"\x1b[2J" in said
        assert "[/red]" in said


@pytest.mark.parametrize("text", ["$x^{2$", "a$", "$$", r"\$a$", "$\\frac{1}{0}$ and $", EVIL, "你好 🧑\u200d🚀"])
def test_every_drawing_shows_text_as_it_is(text):
    shown = f"<!-- {re.sub('--', '- -', visible(text)).replace('<', '&lt;').replace('>', '&gt;')}"
    table = np.array([[1.0]])
    heat = HeatMap(literal(text), text, table, [[text]], "x", "y", [text], [text])
    for drawing in (draw(Panel(literal(text), text, "x", "y")), draw_heat_map(heat)):
        comments = re.findall("<!-- .*? -->", drawing)
        assert any(comment.startswith(shown) for comment in comments), comments
        assert not ACTING.search(drawing)
    heads = pd.DataFrame({"stack": [text], "layer": [0], "head": [0], "entropy": [0.5]})
    draw_maps(heads, {(text, 0, 0): torch.ones(1, 1)}, tokens=[text])


def test_a_scalar_with_a_formula_in_its_name_is_drawn_as_text(tmp_path, capsys):
    write_run(tmp_path / "run", **{"loss $x^{2$": 1.0, "b\ud800": 2.0})
    assert run(["track", str(tmp_path / "run"), "--out", str(tmp_path / "store")]) == 0, capsys.readouterr().err
    assert "<!-- loss $x^{2$ -->" in (tmp_path / "store" / "report.html").read_text()
    assert "training_b\\ud800" in RunStore(tmp_path / "store").table()


def test_html_holds_text_as_text():
    page = str(subscripts(f"W_QK {EVIL}"))
    assert "W<sub>QK</sub>" in page
    assert "<script>" not in page
    assert not ACTING.search(page)
