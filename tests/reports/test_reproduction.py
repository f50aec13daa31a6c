"""`qkov reproduce` from end to end, and its page in a browser: on a phone, in the dark, with no network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from qkov.analyses.dynamics import Parameterization, Start, train
from qkov.analyses.studies import training
from qkov.analyses.studies.plan import Batch, Plan
from qkov.analyses.studies.reproduction import Reproduction, open_reproduction
from qkov.analyses.studies.tables import all_tables
from qkov.analyses.studies.training import reproduce
from qkov.analyses.studies.trajectories import trajectories
from qkov.circuits import CallError, QkovError
from qkov.reports.commands.main import run
from qkov.reports.pages.reproduction_report import reproduction_summary
from safetensors import safe_open

from .test_page import references


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the command of the README leaves behind, run as a user does, at its default step."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    command = [sys.executable, "-m", "qkov.reports", "reproduce", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"report: {out / 'report.html'}"
    return out


@pytest.fixture(scope="module")
def reproduction(folder) -> Reproduction:
    return open_reproduction(folder)


@pytest.fixture(scope="module")
def summary(reproduction) -> dict:
    return reproduction_summary(all_tables(reproduction))


def test_matched_loss_within_one_percent_for_all_twelve_runs(summary):
    table = pd.DataFrame(summary["matched_loss"])
    assert len(table[["parameterization", "ratio"]].drop_duplicates()) == 12
    assert set(table["ratio"]) == {0.01, 1.0, 100.0}
    for mu in ("mu_qk", "mu_ov"):
        assert (abs(table[mu] / table[f"{mu}_predicted"] - 1) < 0.01).all()
    assert (abs(table["alpha"] - table["alpha_predicted"]) < 0.003).all()
    assert (abs(table["loss_trained"] / table["loss"] - 1) < 1e-4).all()


def test_first_integrals_and_the_ratio_read_from_the_weights(summary):
    assert summary["largest_residual"] < 1e-2
    for row in summary["ratios"]:
        assert row["best"] == row["parameterization"]
        assert row["recovered"] == pytest.approx(row["ratio"], rel=0.01)


def test_collapsed_runs_at_the_rescaled_rate_trace_the_factorized_ones(summary):
    assert summary["rescaled_difference"] < 0.01


def test_omega_gives_the_balanced_steps_and_not_the_unbalanced_ones(summary):
    table = pd.DataFrame(summary["preconditioner"])
    balanced, spread, unbalanced = (table[table["kind"] == kind] for kind in ("balanced", "spread", "unbalanced"))
    assert len(balanced) == 12
    assert (balanced["omega_cosine"] > 0.999).all()
    assert (spread["omega_cosine"] > 0.999).all()
    assert (spread["gradient_cosine"] < 0.9).all()
    assert (unbalanced["omega_cosine"] < 0.9).all()
    assert (table["exact_error"] < 0.01).all()


def test_runs_keep_to_the_equations_in_time(summary):
    table = pd.DataFrame(summary["flow"])
    assert len(table) == 12
    # Where a scale grows by the power of time that a saddle allows, a delay of a thousandth is a larger distance.
    assert (table[["mu_qk", "mu_ov"]].max(axis=1) < 0.05).all()
    assert (table["alpha"] < 0.05).all()


def test_a_loss_that_no_run_reaches_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", lambda *given, **options: train(*given, **options, max_steps=3))
    plan = Plan(ratios=(1.0,), losses=(0.5,), step=0.05, checkpoints=4)
    batch = Batch("balanced", Parameterization.CACO, (1.0,), Start(0.0, 0.0))
    with pytest.raises(QkovError, match=r"the run CACO_r1 did not reach a loss of 0\.5"):
        training._train(plan, batch, tmp_path)


def test_faster_qk_sharpens_attention_at_equal_loss(summary):
    table = pd.DataFrame(summary["matched_loss"])
    for _, rows in table[table["loss"] <= 0.1].groupby(["parameterization", "loss"]):
        assert rows.sort_values("ratio")["alpha"].is_monotonic_increasing


def test_every_run_stays_on_its_direction(reproduction):
    measured = trajectories(reproduction)
    for aligned in reproduction.of_kind("balanced", "rescaled"):
        for cosine in ("cosine_qk", "cosine_ov"):
            assert (measured[aligned.name][cosine].dropna() > 1 - 1e-9).all()


def test_checkpoints_carry_what_made_them(folder):
    path = sorted((folder / "runs" / "FAFO_r1").iterdir())[-1]
    with safe_open(path, framework="pt") as handle:
        metadata = json.loads(handle.metadata()["qkov"])
    assert metadata["settings"]["parameterization"] == "FAFO"
    assert metadata["settings"]["ratio"] == 1.0
    assert metadata["settings"]["setting"]["M"] == 4
    assert (metadata["settings"]["imbalance"], metadata["settings"]["spread"]) == (0.0, 0.0)
    assert metadata["scalars"]["loss"] == pytest.approx(1e-8, rel=1e-4)


def test_the_page_answers_in_order_and_fetches_nothing(folder):
    page = (folder / "report.html").read_text()
    questions = re.findall(r"<h2>(.*?)</h2>", page)
    assert questions == [
        "What was run",
        "Does faster QK sharpen attention at equal loss?",
        "Do the factorized runs follow the rescaled dynamics?",
        "Which growth law holds?",
        "Does Ω(C) give the step that factorized training took?",
        "What was used",
    ]
    found = references(page)
    assert found.scripts == 0
    assert [address for address in found.fetched if not address.startswith(("#", "data:"))] == []
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    assert not re.search(r"\bnan\b", re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).lower())


def test_rendered_again_from_the_folder_alone(folder, tmp_path, capsys):
    assert run(["report", str(folder), "--out", str(tmp_path / "again.html")]) == 0
    capsys.readouterr()
    # Ids are counted on, and the page names the command that rendered it; the one that trained stays.
    strip = re.compile(r"figure\d+-|rendered by <code>[^<]*</code>")
    first, again = (strip.sub("", path.read_text()) for path in (folder / "report.html", tmp_path / "again.html"))
    assert again == first
    assert re.search(r"trained by <code>qkov reproduce --out ", again)


def test_a_reproduction_that_did_not_finish(tmp_path, capsys):
    (tmp_path / "reproduction.json").write_text('{"format": "qkov reproduction 1", "finished": false}')
    with pytest.raises(CallError, match="did not finish; run qkov reproduce --out"):
        open_reproduction(tmp_path)
    (tmp_path / "reproduction.json").write_text('{"format": "qkov reproduction 1"}')
    assert run(["report", str(tmp_path)]) == 2
    assert "cannot be read as a finished reproduction" in capsys.readouterr().err


def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "thesis.txt").write_text("ten years")
    for content in ('{"my": "own"}', "not even JSON", "[]"):
        (tmp_path / "reproduction.json").write_text(content)
        with pytest.raises(CallError, match="is not empty and was not written by qkov reproduce"):
            reproduce(Plan(ratios=(1.0,), losses=(0.5,), step=0.05, checkpoints=4), tmp_path)
        assert (tmp_path / "reproduction.json").read_text() == content
    assert (tmp_path / "runs" / "thesis.txt").read_text() == "ten years"


def test_a_smaller_plan_overwrites_an_earlier_one(tmp_path):
    plan = Plan(ratios=(1.0,), losses=(0.5, 0.1), step=0.05, checkpoints=4)
    first = reproduce(plan, tmp_path / "out")
    second = reproduce(plan, tmp_path / "out")
    assert first == second
    assert open_reproduction(tmp_path / "out") == second
    for trained in second.runs:
        assert second.store(trained).exists()


PROBE = """
<script>
addEventListener("load", () => {
  const style = getComputedStyle(document.body);
  const svgs = [...document.querySelectorAll("main svg:not(.swatch)")];
  const facts = {
    width: document.documentElement.clientWidth,
    scrollWidth: document.documentElement.scrollWidth,
    background: style.backgroundColor,
    color: style.color,
    axis: getComputedStyle(svgs[0].querySelector("path[style*='stroke: currentColor'], [style*='currentColor']")).color,
    svgs: svgs.length,
    narrowest: Math.min(...svgs.map(svg => svg.getBoundingClientRect().width)),
    requests: performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:")).length,
  };
  document.documentElement.innerHTML = "<pre id=facts>" + JSON.stringify(facts) + "</pre>";
});
</script>
"""


def in_browser(chromium: str, page: Path, tmp_path: Path, width: int, dark: bool) -> dict:
    probed = tmp_path / f"probed_{width}_{dark}.html"
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / f'profile_{width}_{dark}'}",
        f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"file://{probed}",
    ]
    dumped = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r'<pre id="facts">(.*?)</pre>', dumped)
    assert found, dumped[:2000]
    return json.loads(found[1])


def luminance(color: str) -> float:
    """Relative luminance as the Web Content Accessibility Guidelines 2.1 define it."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [500, 1200], ids=["phone", "desk"])
def test_in_a_browser(chromium, folder, tmp_path, width, dark):
    facts = in_browser(chromium, folder / "report.html", tmp_path, width, dark)
    assert facts["requests"] == 0
    assert facts["scrollWidth"] <= facts["width"]
    assert facts["svgs"] == 19
    assert facts["narrowest"] > 250
    background, ink = luminance(facts["background"]), luminance(facts["color"])
    assert (background < 0.1) == dark
    lighter, darker = max(background, ink), min(background, ink)
    assert (lighter + 0.05) / (darker + 0.05) > 7
    assert facts["axis"] == facts["color"]
