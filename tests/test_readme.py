"""The README is true: its code runs, its mappings are mappings, its commands exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.reports.commands.families import families_lines
from qkov.reports.commands.main import app, run
from typer.main import get_command

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"))
def test_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    if "figures" in names:
        assert names["figures"]["singular_values"].shape == (12, 64)
    if "circuits" in names:
        assert run(["report", "qkov-live"]) == 0
        assert set(names["circuits"].table()["step"]) == {0, 10, 20}
        assert len(names["probe"].table()) == 2 * 4


def test_what_the_comments_say_of_the_theory_is_so():
    (code,) = (code for code in blocks("python") if "at_loss" in code)
    names: dict = {}
    exec(code, names)
    found = names["at_loss"](names["setting"], names["Parameterization"].CACO, r=0.01, loss=1e-4)
    (comment,) = re.findall(r"loss=1e-4\)  # (mu_qk .*)", code)
    assert comment == f"mu_qk {found.mu_qk:.4g}, mu_ov {found.mu_ov:.4g}, attention {found.attention:.4g}"
    fits = names["fit_ratio"](names["flow"].mu_ov, names["flow"].mu_qk, names["setting"])
    assert fits.best is names["Parameterization"].FAFO


@pytest.mark.parametrize("table", blocks("toml"))
def test_mappings_are_mappings(table):
    keys = tomllib.loads(table)
    mapping = parse_mapping(keys, "the README")
    assert mapping.tensors == keys["tensors"]
    assert (mapping.heads, mapping.prefix) == (keys["heads"], keys.get("prefix", ""))
    assert mapping.scalars == keys.get("scalars", {})
    stated = {name: keys[name] for name in ("norm", "rotary") if name in keys}
    assert mapping.facts.table == stated
    # Every weight has a layout: the stated one, or the one that the name of a layout stands for.
    weights = {"Q", "K", "V", "O", "QKV"} & set(keys["tensors"])
    assert set(mapping.layouts) == weights
    if isinstance(keys["layout"], dict):
        assert mapping.layouts == keys["layout"]


def test_there_are_mappings():
    """Without them the test above would run for none."""
    assert blocks("toml")


def test_commands_exist_with_their_options(capsys):
    commands = getattr(get_command(app), "commands")  # noqa: B009 (typer declares less than it returns)
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    ours = [shlex.split(line) for line in lines if line.startswith("qkov ")]
    assert {words[1] for words in ours} == {"inspect", "track", "report", "predict", "explain"}
    for words in ours:
        known = {option for parameter in commands[words[1]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    (predict,) = (words[1:] for words in ours if words[1] == "predict")
    assert run(predict) == 0
    assert "alpha 0.148830  mu_QK 0.558776  mu_OV 81.6687" in capsys.readouterr().out


def test_the_list_of_families_is_made_from_the_data():
    (stated,) = re.findall(r"<!-- families -->\n(.*)<!-- /families -->", README, flags=re.DOTALL)
    assert stated.strip().splitlines() == families_lines()


def test_the_two_commands_are_where_ci_looks():
    for mark, ending in (("main", ".venv/bin/qkov reproduce"), ("test", ".venv/bin/pytest")):
        found = re.search(rf"^<!-- {mark} command -->\n```sh\n(.+)\n```$", README, flags=re.MULTILINE)
        assert found
        assert found[1].endswith(ending)
