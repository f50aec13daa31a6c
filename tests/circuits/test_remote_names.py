"""Names from afar: of one file, never a path; and what is on this machine stays as it is."""

import json
from io import BytesIO
from pathlib import Path

import fsspec
import pytest
import torch
from qkov.circuits import CallError, QkovError, find_checkpoints
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.checkpoints.runs import find_run
from qkov.circuits.storage.address import place_of
from qkov.circuits.storage.kept import KeptPlace
from qkov.circuits.storage.places import LocalPlace
from qkov.circuits.storage.remote_names import last_part, refusal_of, slug
from safetensors.torch import save, save_file

from .scripted_server import Answer, answering, without_waiting


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    return without_waiting(monkeypatch)


def torch_file(**tensors) -> bytes:
    content = BytesIO()
    torch.save(tensors, content)
    return content.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "step=5", "a b.pt", "é𝕏.pth", "..a", "a..b", "...", "-rf", "~", "50%.pt", "100%25.pt"),
        *("x" * 255, "é" * 127, "con", "ab:c", "%", "%zz"),
    ],
)
def test_names_of_one_file(name):
    assert refusal_of(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            ".",
            "..",
            "/",
            "/etc/passwd",
            "a/b",
            "a/../b",
            "..\\x",
            "\\\\host\\x",
            "a\\b",
            "C:x",
            "c:\\x",
            "a:b",
            "a/",
        ),
        *("%2Ftmp%2Fx", "%2ftmp", "%252Ftmp", "%25252525252Ftmp", "..%2Fx", "%2E%2E", "%252E%252E", "%5Cx", "%255c"),
        *("a\0b", "%00", "%2500", "a\nb", "a%0Ab", "\x1b[2J", "a\u202eb", "\ud800", "x" * 256, "é" * 128, "%43%3Ax"),
    ],
)
def test_names_that_are_paths_or_cannot_be_stored(name):
    assert refusal_of(name) is not None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/run/a%20b.pt", "a b.pt"),
        ("/run/%2Ftmp%2Fvictim%2Fx_step_5.pth", "x_step_5.pth"),
        ("/o/run%2Fmodel_step_5.pth", "model_step_5.pth"),
        ("/run/%252Ftmp%252Fx.pth", "x.pth"),
        ("/run/..%5C..%5Cx.pth", "x.pth"),
        ("/run/100%2525.pt", "100%25.pt"),
        ("/run/", "run"),
        ("/", ""),
    ],
)
def test_the_last_part_of_a_path(path, name):
    assert last_part(path) == name


@pytest.mark.parametrize(
    "attack",
    [
        "{folder}%2Fx_step_5.pth",
        "{folder}%252Fx_step_5.pth",
        "..%2F..%2F..%2F..%2F..%2F..{folder}%2Fx_step_5.pth",
        "..%5Cx_step_5.pth",
        "%2E%2E%5C%2E%2E%2Fx_step_5.pth",
    ],
)
def test_a_name_afar_writes_nothing_on_this_machine(tmp_path, monkeypatch, attack):
    victim, kept = tmp_path / "victim", tmp_path / "kept"
    victim.mkdir()
    (victim / "x_step_5.pth").write_bytes(b"precious")
    monkeypatch.chdir(victim)
    content = torch_file(a=torch.ones(3))
    with answering(lambda request: Answer(content=content) if request.path.endswith(".pth") else Answer(404)) as (
        address,
        _,
    ):
        place = place_of(f"{address}/run/{attack.format(folder=str(victim).replace('/', '%2F'))}")
        assert open_weights(place).read(["a"])["a"].tolist() == [1, 1, 1]
        kept_place = KeptPlace(place, kept)
        for _ in range(2):
            with kept_place.local_copy() as copy:
                assert copy.read_bytes() == content
                assert copy.parent == kept
    assert (victim / "x_step_5.pth").read_bytes() == b"precious"
    assert [path.name for path in victim.iterdir()] == ["x_step_5.pth"]


@pytest.mark.parametrize(
    "name", ["..%2F", "%2E%2E", "a%00b_step_5.pth", "a%0Ab_step_5.pth", "%1b[2J_step_5.pth", "x" * 300]
)
def test_an_address_whose_last_part_is_no_name_is_refused(name):
    with pytest.raises(CallError, match=r"^the last part of http://127\.0\.0\.1:1/run/"):
        place_of(f"http://127.0.0.1:1/run/{name}")


def test_entries_that_a_server_lists_under_paths_are_named_and_left_out(tmp_path):
    names = ["m_step_1.safetensors", "%2Ftmp%2Fm_step_2.safetensors", "..%5Cm_step_3.safetensors", "m%00_step_4.pth"]
    page = "".join(f'<a href="{name}">x</a>' for name in names).encode()

    def answer(request) -> Answer:
        if request.path == "/run/":
            return Answer(content=page, headers={"Content-Type": "text/html"})
        if request.path.endswith("m_step_1.safetensors"):
            return Answer(content=save({"a": torch.ones(1)}))
        return Answer(404)

    with answering(answer) as (address, _):
        run = find_run(f"{address}/run/")
    assert [each.step for each in run.checkpoints] == [1]
    assert run.left_out == {
        "/tmp/m_step_2.safetensors": "is a path and not a name: refused",
        "..\\m_step_3.safetensors": "is a path and not a name: refused",
        "m\0_step_4.pth": "holds control characters: refused",
    }


def test_entries_of_an_archive_are_judged_as_well(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    archive = fsspec.filesystem("zip", fo=str(tmp_path / "run.zip"), mode="w")
    for name in ("m_step_1.safetensors", "..\\m_step_2.safetensors"):
        archive.put(str(tmp_path / "model.safetensors"), name)
    archive.close()
    run = find_run(f"zip://::{tmp_path}/run.zip")
    assert [each.step for each in run.checkpoints] == [1]
    assert list(run.left_out) == ["..\\m_step_2.safetensors"]


@pytest.mark.parametrize(
    "shard", ["%2e%2e/x.safetensors", "%2Fetc%2Fpasswd", "a\0.safetensors", "a//b.safetensors", "C:x", "x" * 256]
)
def test_an_index_names_files_below_its_folder(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(QkovError, match="points outside its folder") as refused:
        open_weights(tmp_path)
    assert "\n" not in str(refused.value)


def test_an_index_may_name_files_in_a_folder_below(tmp_path):
    (tmp_path / "parts").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "parts" / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "parts/one.safetensors"}}))
    assert open_weights(tmp_path).read(["a"])["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["%2Ftmp", "a\\b", "..x", "a\nb", "my run: 50%", "C:", "%252F"])
def test_a_local_folder_with_an_odd_name_stays_readable(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for step in (1, 2):
        save_file({"a": torch.full((1,), float(step))}, folder / f"{name}_step_{step}.safetensors")
    checkpoints = find_checkpoints(folder)
    assert [each.step for each in checkpoints] == [1, 2]
    assert open_weights(checkpoints[1].address).read(["a"])["a"].tolist() == [2]
    assert isinstance(place_of(str(folder)), LocalPlace)
    assert place_of(str(folder)).address == str(folder)


def test_a_local_file_that_is_kept_stays_where_it_is(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "own.pt").write_bytes(b"own")
    with KeptPlace(LocalPlace(tmp_path / "own.pt"), tmp_path / "kept").local_copy() as copy:
        assert copy.read_bytes() == b"own"
    assert (tmp_path / "own.pt").read_bytes() == b"own"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pythia-70m@step1000", "pythia-70m@step1000"),
        ("/tmp/x", "tmp-x"),
        ("..", "remote"),
        ("a b\n<c>", "a-b-c"),
        ("é=1", "é=1"),
        ("x" * 300, "x" * 100),
        ("\x1b[2J", "2J"),
    ],
)
def test_the_folder_named_after_an_address(name, expected):
    assert slug(name) == expected
    assert Path(f"qkov-{slug(name)}").name == f"qkov-{slug(name)}"
