"""The page of a run in training: what it shows is what the store holds, and it is served to this machine alone."""

import html
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import RunStore
from qkov.circuits import CallError
from qkov.probes import CircuitProbe
from qkov.reports.commands.main import run
from qkov.reports.drawing.small_multiples import SmallMultiples, draw_small_multiples, scale_of
from qkov.reports.pages.run_facts import failures_in_words
from qkov.reports.watching.content import content_of, status_of, title_of
from qkov.reports.watching.reading import Reading, StoreReader, age_in_words
from qkov.reports.watching.server import WatchServer

from ..probes.circuit_models import Classifier, loss_of
from .browser import Tab, browser

ROOT = Path(__file__).resolve().parents[2]


def rows_in(reader: StoreReader) -> pd.DataFrame:
    assert reader.reading.rows is not None
    return reader.reading.rows


class Training:
    """A small model in training whose store grows as it is told."""

    def __init__(self, folder: Path, **options) -> None:
        self.model = Classifier()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.probe = CircuitProbe(self.model, folder, every=1, optimizer=self.optimizer, **options)

    def goes_on(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, self.probe.steps).backward()
            self.probe.note(loss=1.0 / (1 + self.probe.steps), learning_rate=0.1)
            self.optimizer.step()


# What is drawn


def grid(y, log=False) -> SmallMultiples:
    y = np.asarray(y, dtype=float)[None]
    names = [[f"curve {number}" for number in range(y.shape[1])]]
    x = np.arange(y.shape[2], dtype=float) ** 2
    return SmallMultiples("curves", ["0"], list("ab")[: y.shape[1]], x, y, names, names, log)


def points(drawn: str) -> list[list[tuple[float, float]]]:
    """The points of each curve."""
    paths = re.findall(r'<path d="M([^"]+)"', drawn)
    return [[(float(x), float(y)) for x, y in (point.split() for point in path.split("L"))] for path in paths]


def test_curves_share_their_axes():
    # The margins are 0.06 of a height of 80 units; x = 0, 1, 4 of 200 units.
    low, high = 80 * 0.94, 80 * 0.06
    drawn = grid([[1.0, 2.0, 5.0], [3.0, math.nan, 1.0]])
    assert scale_of(drawn) == (1.0, 5.0)
    one, other = points(draw_small_multiples(drawn))
    assert one == [(0, round(low)), (50, round(low - 0.25 * (low - high))), (200, round(high))]
    assert other == [(0, round((low + high) / 2)), (200, round(low))]


def test_logarithmic_curves_leave_out_what_has_no_logarithm():
    drawn = grid([[0.01, 0.0, 1.0], [0.1, -3.0, math.inf]], log=True)
    assert scale_of(drawn) == (0.01, 1.0)
    (one, other) = re.findall(r'<path d="M([^"]+)"', draw_small_multiples(drawn))
    assert points(f'<path d="M{one}"') == [[(0, 75), (200, 5)]]
    assert other == "0 40H200"  # one value, in the middle of the decades


def test_what_is_constant_or_missing_is_drawn_so():
    assert points(draw_small_multiples(grid([[2.0, 2.0, 2.0]]))) == [[(0, 40), (50, 40), (200, 40)]]
    nothing = grid([[math.nan] * 3])
    assert scale_of(nothing) is None
    assert "<path" not in draw_small_multiples(nothing)
    huge = np.array([-1e308, 0.0, 1e308])
    assert [y for _, y in points(draw_small_multiples(grid([huge])))[0]] == [75, 40, 5]


def test_the_shade_is_that_of_the_last_value_and_texts_are_escaped():
    drawn = replace(grid([[1.0, 5.0, 3.0], [1.0, 2.0, 5.0]]), names=[['<b>"', "two"]], written=[["3", "5"]])
    shades = re.findall(r"background: rgb\(58 126 191 / ([0-9.]+)\)", draw_small_multiples(drawn))
    assert [float(shade) for shade in shades] == [pytest.approx(0.275, abs=1e-3), pytest.approx(0.55, abs=1e-3)]
    assert 'title="&lt;b&gt;&#34;: 3"' in draw_small_multiples(drawn)


# What is read


def test_a_reading_is_the_table_and_nothing_is_read_twice_but_the_last_step(tmp_path, monkeypatch):
    asked: list[int] = []
    rows_of = RunStore.rows_of
    monkeypatch.setattr(RunStore, "rows_of", lambda store, step: asked.append(step) or rows_of(store, step))
    reader = StoreReader(tmp_path / "run")
    training = Training(tmp_path / "run")
    training.goes_on(3)
    asked.clear()
    assert reader.refresh()
    assert sorted(asked) == [0, 1, 2, 3]
    wanted = training.probe.table()
    shared = [name for name in rows_in(reader) if name in wanted]
    assert {"training_loss", "frobenius_norm", "effective_ratio", "taken_rate"} <= set(shared)
    found = rows_in(reader).sort_values(["step", "stack", "layer", "head", "circuit"], ignore_index=True)
    pd.testing.assert_frame_equal(found[shared], wanted[shared], check_dtype=False)
    asked.clear()
    assert not reader.refresh()
    assert asked == []
    training.goes_on()
    asked.clear()
    assert reader.refresh()
    assert sorted(asked) == [3, 4]  # a loss may follow the step that was the last one
    assert reader.reading.steps == (0, 1, 2, 3, 4)


def test_what_follows_a_step_is_read_as_well(tmp_path):
    training = Training(tmp_path / "run")
    training.goes_on()
    reader = StoreReader(tmp_path / "run")
    reader.refresh()
    assert "training_extra" not in rows_in(reader)
    training.probe.add_scalars(1, extra=7.0)
    assert reader.refresh()
    assert rows_in(reader).query("step == 1")["training_extra"].tolist() == [7.0] * 4


def test_of_many_steps_a_bounded_number_is_held_evenly_spaced_and_with_the_last(tmp_path):
    training = Training(tmp_path / "run")
    training.goes_on(10)
    reader = StoreReader(tmp_path / "run", most=4)
    reader.refresh()
    assert reader.reading.steps == tuple(range(11))
    assert list(rows_in(reader)["step"].unique()) == [0, 4, 8, 10]
    training.goes_on()
    reader.refresh()
    assert list(rows_in(reader)["step"].unique()) == [0, 4, 8, 11]
    assert status_of(reader.reading) == [
        "Step 11, the last of 12 logged steps since step 0.",
        "The curves show 4 of them, evenly spaced.",
    ]
    whole = StoreReader(tmp_path / "run")
    whole.refresh()
    assert status_of(whole.reading) == ["Step 11, the last of 12 logged steps since step 0."]


def test_a_run_that_another_probe_resumed_is_read_anew(tmp_path):
    Training(tmp_path / "run").goes_on(2)
    reader = StoreReader(tmp_path / "run")
    reader.refresh()
    old = rows_in(reader).query("step == 1")["taken_step_norm"].to_numpy()
    with pytest.warns(UserWarning, match="its later steps, 2 of them"):
        again = Training(tmp_path / "run", start=0, resume=True)
    with torch.no_grad():
        again.optimizer.param_groups[0]["lr"] = 0.3
    again.goes_on()
    again.goes_on()
    reader.refresh()
    new = rows_in(reader).query("step == 1")["taken_step_norm"].to_numpy()
    np.testing.assert_array_equal(new, RunStore(tmp_path / "run").rows_of(1)["taken_step_norm"])
    assert (new > 1.5 * old).all()


def test_a_store_that_is_absent_empty_damaged_or_deleted_is_said_to_be_and_waited_for(tmp_path):
    folder = tmp_path / "run"
    reader = StoreReader(folder)
    reader.refresh()
    assert reader.reading.problem == f"There is no run store in {folder} yet."
    assert reader.reading.changed is None
    folder.mkdir()
    (folder / "run.json").write_text("{")
    assert reader.refresh()
    assert re.search(r"run\.json .*", reader.reading.problem)
    shutil.rmtree(folder)
    training = Training(folder)
    training.goes_on()
    assert reader.refresh()
    assert reader.reading.problem == ""
    assert abs(reader.reading.changed - max(f.stat().st_mtime for f in folder.rglob("*") if f.is_file())) < 1e-6
    for file in (folder / "steps").rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:40])
    assert reader.refresh()
    assert "Parquet" in reader.reading.problem
    # What was read before stays on the page.
    assert set(rows_in(reader)["step"]) == {0, 1}
    assert not reader.refresh()
    shutil.rmtree(folder)
    reader.refresh()
    assert reader.reading.problem == f"There is no run store in {folder} yet."


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s ago"),
        (0.9, "0 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (172_799, "47 h ago"),
        (172_800, "2 days ago"),
    ],
)
def test_the_age_of_the_last_step_in_words(seconds, words):
    assert age_in_words(1000.0, 1000.0 + seconds) == words


def test_what_was_never_written_has_no_age():
    assert age_in_words(None) == "never"


# What is shown


def test_the_page_holds_the_figures_of_every_head(tmp_path):
    training = Training(tmp_path / "run")
    training.goes_on(3)
    reader = StoreReader(tmp_path / "run")
    reader.refresh()
    content = content_of(reader.reading)
    table = training.probe.table()
    norms = table[table["circuit"] == "QK"].pivot(index="head", columns="step", values="frobenius_norm").to_numpy()
    low, high = norms.min(), norms.max()
    expected = [
        [
            (round(200 * step / 3), round(80 * (0.94 - 0.88 * (value - low) / (high - low))))
            for step, value in enumerate(of_head)
        ]
        for of_head in norms
    ]
    grids = content.split("<h3>")
    assert "norm of W<sub>QK</sub>" in grids[1]
    assert points(grids[1]) == expected
    assert f"from {low:.3g} to {high:.3g}" in grids[1]
    last = table[table["step"] == 3].set_index(["head", "circuit"])
    cells = re.findall(r"<td>([^<]*)</td>", content[content.index("head by head") :])
    assert cells[1] == f"{last.loc[(0, 'QK'), 'frobenius_norm']:#.4g}"
    assert cells[2] == f"{last.loc[(0, 'OV'), 'frobenius_norm']:#.4g}"
    # Loss first, then the heads, then the rest.
    order = [content.index(f"<h2>{title}") for title in ("Loss", "Every head", "What else was passed", "Step 3, head")]
    assert order == sorted(order)
    assert title_of(reader.reading) == "step 3, loss 0.3333"


def test_stacks_are_apart_and_figures_that_are_missing_are_left_out(tmp_path):
    rows = pd.DataFrame(
        [
            {"step": 4, "stack": stack, "layer": 0, "head": head, "circuit": "OV", "frobenius_norm": 2.0 + head}
            for stack, head in (("encoder", 0), ("encoder", 1), ("decoder", 0))
        ]
    )
    reading = Reading({"source": "x"}, (4,), rows)
    content = content_of(reading)
    assert re.findall("<h3>(.*?)</h3>", content) == [
        "Encoder: norm of W<sub>OV</sub>",
        "Decoder: norm of W<sub>OV</sub>",
    ]
    assert "<h2>Loss" not in content
    assert 'title="encoder layer 0, head 1: 3.00"' in content
    assert title_of(reading) == "step 4"
    assert status_of(reading) == ["Step 4."]


def test_of_thousands_of_heads_the_page_stays_small():
    places = pd.MultiIndex.from_product([range(120), range(40), range(64), ["QK"]])
    rows = places.to_frame(index=False, name=["step", "layer", "head", "circuit"]).assign(stack="")
    rows["frobenius_norm"] = np.random.default_rng(0).random(len(rows))
    content = content_of(Reading({}, tuple(range(120)), rows))
    assert content.count('class="multiple"') == 40 * 64
    assert len(content) < 2_000_000
    assert "2260 more heads are in the store." in content


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({}, ""),
        (
            {"failures": {"count": 1, "last": "logging step 3 failed (OSError: full)"}},
            "1 measurement failed while training went on; the last one: logging step 3 failed (OSError: full).",
        ),
        (
            {"failures": {"count": 3, "last": "x"}},
            "3 measurements failed while training went on; the last one: x.",
        ),
    ],
)
def test_failures_are_told(description, words):
    assert failures_in_words(description) == words
    content = content_of(Reading(description))
    assert (html.escape(words) in content) if words else ("failed" not in content)


def test_a_failure_while_training_is_on_the_page_and_in_the_report(tmp_path):
    def fail(step: int, values: dict[str, float]) -> None:
        del values
        if step in (1, 2, 3):
            raise ConnectionError("<b>away</b>")

    training = Training(tmp_path / "run", log=fail)
    with pytest.warns(UserWarning, match="ConnectionError"):
        training.goes_on(4)
    assert RunStore(tmp_path / "run").description()["failures"] == {
        "count": 3,
        "last": "logging step 3 failed (ConnectionError: <b>away</b>)",
    }
    reader = StoreReader(tmp_path / "run")
    reader.refresh()
    assert run(["report", str(tmp_path / "run")]) == 0
    for page in (content_of(reader.reading), (tmp_path / "run" / "report.html").read_text()):
        assert "3 measurements failed while training went on; the last one: logging step 3 failed" in page
        assert "&lt;b&gt;away" in page
        assert "<b>away" not in page


def test_an_empty_store_and_a_problem_are_said():
    assert status_of(Reading({})) == []
    assert status_of(Reading({"source": "x"})) == ["The store holds no step yet."]
    assert title_of(Reading({})) == "waiting for a run"
    assert "This page waits" in content_of(Reading({}, problem="It is <damaged>."))
    assert "It is &lt;damaged&gt;." in content_of(Reading({}, problem="It is <damaged>."))
    assert "This page waits" not in content_of(Reading({}))


# What is served


@contextmanager
def served(folder: Path) -> Iterator[WatchServer]:
    server = WatchServer(folder)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(timeout=30)


def asked(server: WatchServer, path: str, method: str = "GET", host: str | None = None):
    """The status, the headers and the text of an answer; the path is sent as it is."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_the_page_is_served_and_told_what_changed(tmp_path):
    training = Training(tmp_path / "run")
    with served(tmp_path / "run") as server:
        status, headers, page = asked(server, "/")
        assert status == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert "live: Classifier in" in page
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
        (nonce,) = re.findall(r'<script nonce="([^"]+)">', page)
        assert f"script-src 'nonce-{nonce}'" in headers["Content-Security-Policy"]
        assert asked(server, "/")[1]["Content-Security-Policy"] != headers["Content-Security-Policy"]
        status, headers, text = asked(server, "/content")
        first = json.loads(text)
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        assert first["content"] in page
        assert json.loads(asked(server, f"/content?have={first['version']}")[2])["content"] is None
        training.goes_on()
        until = threading.Event()
        second = first
        for _ in range(100):
            second = json.loads(asked(server, f"/content?have={first['version']}")[2])
            if second["content"] is not None:
                break
            until.wait(0.1)
        assert second["title"] == "step 1, loss 1.000"
        assert second["version"] != first["version"]
        assert second["age"].endswith("s ago")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::1]:1"])
def test_other_names_of_this_machine_are_refused(tmp_path, host):
    Training(tmp_path / "run")
    with served(tmp_path / "run") as server:
        for path in ("/", "/content"):
            status, _, text = asked(server, path, host=host)
            assert status == 403
            assert text == "this page is served to 127.0.0.1 and localhost alone\n"
        # A port that is forwarded from elsewhere has another number.
        assert asked(server, "/", host="localhost:1234")[0] == 200
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    ["/run.json", "/../run.json", "/content/../run.json", "//etc/passwd", "/%2e%2e/run.json", "/content/", "run.json"],
)
def test_no_path_is_a_file(tmp_path, path):
    Training(tmp_path / "run")
    with served(tmp_path / "run") as server:
        status, _, text = asked(server, path)
        assert (status, text) == (404, "there is nothing here: the page is at /\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_sent(tmp_path, method):
    with served(tmp_path / "run") as server:
        assert asked(server, "/", method)[0] == 501


def test_a_port_that_is_taken_is_one_line(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["watch", str(tmp_path / "run"), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"qkov: port {port} cannot be listened on (another program listens on it): give another one as --port, or "
        f"leave it out\n"
    )
    with pytest.raises(CallError, match="port 70000 cannot be listened on"):
        WatchServer(tmp_path, 70_000)


def test_a_file_is_not_a_store(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    assert run(["watch", str(tmp_path / "run")]) == 2
    assert "is a file: expected the folder of a run store" in capsys.readouterr().err
    assert run(["watch", str(tmp_path / "other"), "--port", "70000"]) == 2


def test_the_command_serves_until_it_is_interrupted(tmp_path, heard_interrupts):
    process = subprocess.Popen(
        [sys.executable, "-m", "qkov.reports", "watch", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    line = process.stdout.readline()
    found = re.fullmatch(r"watching run at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)\n", line)
    assert found, line + process.stderr.read()
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
    connection.request("GET", "/")
    assert "There is no run store in run yet. This page waits" in connection.getresponse().read().decode()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("stopped watching\n", "")
    assert process.returncode == 0


# In a browser


@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_new_steps_where_the_reader_is(tmp_path, chromium, width):
    training = Training(tmp_path / "run")
    training.goes_on(2)
    server = WatchServer(tmp_path / "run")
    answered = server.answer

    def answer(have: str):
        # The store grows between the first answer and the next one.
        if have and training.probe.steps == 2:
            training.goes_on()
            server._reader.refresh()
            server._made = server._make()
        return answered(have)

    server.answer = answer
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with browser(chromium, tmp_path / "profile") as port:
            at_first, widths, later, lost = Tab(port, server.url, width).opened(
                "scrollTo(0, 700); [scrollY, document.querySelectorAll('h2')[2].textContent]",
                "[document.documentElement.scrollWidth, innerWidth]",
                """new Promise((found) => setInterval(() => {
                    if (document.title.startsWith("step 3")) found([scrollY, document.body.textContent]);
                }, 50))""",
                """document.getElementById("lost").hidden""",
            )
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)
    assert at_first[0] == 700
    assert later[0] == 700
    assert "Step 3, the last of 4 logged steps since step 0." in later[1]
    assert "Step 3, head by head" in later[1]
    assert widths[0] <= widths[1] == width
    assert lost is True


def test_a_page_whose_server_has_ended_says_so(tmp_path, chromium):
    server = WatchServer(tmp_path / "run")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    ending = server.answer

    def answer(have: str):
        if have:
            threading.Thread(target=end).start()
        return ending(have)

    server.answer = answer
    with browser(chromium, tmp_path / "profile") as port:
        (said,) = Tab(port, server.url, 1200).opened(
            """new Promise((found) => setInterval(() => {
                const lost = document.getElementById("lost");
                if (!lost.hidden) found(lost.textContent);
            }, 50))"""
        )
    assert "the command that serves this page does not answer, so the figures are old" in " ".join(said.split())
    thread.join(timeout=30)
