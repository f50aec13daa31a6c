"""Remote weights: which requests are made, what comes back, and every fault in one line."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import pytest
import torch
from qkov.circuits import CallError, QkovError, find_checkpoints
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.checkpoints.runs import find_run
from qkov.circuits.storage.address import place_of
from qkov.circuits.storage.places import LocalPlace
from qkov.circuits.storage.remote import merged
from safetensors.torch import save_file

from .range_server import serving
from .scripted_server import without_waiting

WIDTH = 128


def model(layers=3):
    """Attention between much larger other weights, in the order in which safetensors writes them: by name."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layers):
        for part in ("k", "o", "q", "v"):
            tensors[f"h.{layer}.attn.{part}.bias"] = torch.randn(WIDTH, generator=generator)
            tensors[f"h.{layer}.attn.{part}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator)
        # A tenth of the attention weights, between k and o: too much to be sent along.
        tensors[f"h.{layer}.attn.m"] = torch.randn(WIDTH * WIDTH * 4 // 10, generator=generator)
        tensors[f"h.{layer}.mlp.weight"] = torch.randn(8 * WIDTH, WIDTH, generator=generator)
    return tensors | {"embedding": torch.randn(4000, WIDTH, generator=generator)}


def attention_of(tensors):
    return [name for name in tensors if name.endswith(("q.weight", "k.weight", "v.weight", "o.weight"))]


def size_of(tensors, names):
    return sum(tensors[name].numel() * tensors[name].element_size() for name in names)


def header_size(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def one_line(caught):
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_only_the_header_and_the_attention_tensors_of_a_remote_file_are_sent(tmp_path):
    tensors = model()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "test"}')
    with serving(tmp_path) as (address, traffic):
        file = open_weights(f"{address}/model.safetensors")
        assert file.config == {"model_type": "test"}
        assert traffic.sent["/model.safetensors"] == header_size(tmp_path / "model.safetensors")
        wanted = attention_of(tensors)
        for layer in range(3):
            names = [name for name in wanted if name.startswith(f"h.{layer}.")]
            for name, tensor in file.read(names).items():
                assert torch.equal(tensor, tensors[name])
        sent = traffic.sent["/model.safetensors"] - header_size(tmp_path / "model.safetensors")
    assert size_of(tensors, wanted) <= sent <= 1.05 * size_of(tensors, wanted)


def test_neighbouring_tensors_share_a_request(tmp_path):
    tensors = model(layers=1)
    save_file(tensors, tmp_path / "model.safetensors")
    with serving(tmp_path) as (address, traffic):
        file = open_weights(f"{address}/model.safetensors")
        before = len(traffic.requests)
        file.read(attention_of(tensors))
        # The biases between the weights are few bytes, and are sent along; what lies between k and o is not.
        assert traffic.requests[before:] == 2 * [("GET", "/model.safetensors")]


@pytest.mark.parametrize("by_folder", [True, False])
def test_only_the_shards_with_attention_of_a_remote_model_are_requested(tmp_path, by_folder):
    tensors = model()
    parts = {
        "model-00001-of-00003.safetensors": [name for name in tensors if name.startswith("h.0.")],
        "model-00002-of-00003.safetensors": [name for name in tensors if name.startswith(("h.1.", "h.2."))],
        "model-00003-of-00003.safetensors": ["embedding"],
    }
    for part, names in parts.items():
        save_file({name: tensors[name] for name in names}, tmp_path / part)
    index = {"weight_map": {name: part for part, names in parts.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with serving(tmp_path) as (address, traffic):
        file = open_weights(f"{address}/" if by_folder else f"{address}/model.safetensors.index.json")
        wanted = attention_of(tensors)
        assert all(len(file.shapes[name]) == 2 for name in wanted)
        read = file.read(wanted)
    assert all(torch.equal(read[name], tensors[name]) for name in wanted)
    asked = {path for _, path in traffic.requests if path.startswith("/model-")}
    assert asked == {"/model-00001-of-00003.safetensors", "/model-00002-of-00003.safetensors"}
    headers = sum(header_size(tmp_path / part[1:]) for part in asked)
    assert sum(traffic.sent[part] for part in asked) - headers <= 1.05 * size_of(tensors, wanted)


def test_a_missing_shard_of_a_remote_model(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with serving(tmp_path) as (address, _):
        file = open_weights(f"{address}/model.safetensors.index.json")
        with pytest.raises(QkovError, match=rf"{address}/gone.safetensors is missing, but .* names it") as caught:
            file.read(["a"])
    one_line(caught)


def test_a_server_without_ranges_is_reported_and_sends_no_whole_model(tmp_path):
    tensors = {"a": torch.zeros(6_000_000), "b": torch.ones(10)}
    save_file(tensors, tmp_path / "model.safetensors")
    with serving(tmp_path) as (address, traffic):
        traffic.serves_ranges = False
        with pytest.raises(QkovError, match=r"range requests.*copy it to this machine and give the path") as caught:
            open_weights(f"{address}/model.safetensors")
    assert one_line(caught).startswith(f"{address}/model.safetensors cannot be read")
    assert traffic.sent["/model.safetensors"] < 24_000_000


def test_a_server_that_stops_serving_ranges_gives_no_wrong_bytes(tmp_path):
    save_file({"a": torch.ones(1000), "b": torch.zeros(1000)}, tmp_path / "model.safetensors")
    with serving(tmp_path) as (address, traffic):
        file = open_weights(f"{address}/model.safetensors")
        traffic.serves_ranges = False
        with pytest.raises(QkovError, match=r"was asked for bytes \d+ to \d+ but returned \d+ bytes"):
            file.read(["b"])
        traffic.serves_ranges, traffic.cuts = True, 3
        with pytest.raises(QkovError, match=r"returned 3997 bytes: it was cut short") as caught:
            file.read(["b"])
        one_line(caught)
        traffic.cuts = 0
        assert file.read(["a"])["a"].sum() == 1000


def test_remote_torch_files_are_copied_and_the_copy_is_removed(tmp_path, monkeypatch):
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    tensors = model(layers=1)
    served = tmp_path / "served"
    served.mkdir()
    torch.save({"model": tensors, "loss": 2.5}, served / "step_5.pt")
    (served / "step_6.pt").write_bytes((served / "step_5.pt").read_bytes()[:1000])
    with serving(served) as (address, traffic):
        file = open_weights(f"{address}/step_5.pt")
        assert list(copies.iterdir()) == []
        assert file.scalars == {"loss": 2.5}
        assert torch.equal(file.read(["model.embedding"])["model.embedding"], tensors["embedding"])
        assert traffic.sent["/step_5.pt"] == (served / "step_5.pt").stat().st_size
        with pytest.raises(QkovError, match=rf"{address}/step_6.pt is not a PyTorch file|cannot be read as a PyTorch"):
            open_weights(f"{address}/step_6.pt")
    assert list(copies.iterdir()) == []


def test_a_run_on_a_web_server(tmp_path):
    for step in (1000, 90):
        save_file({"a": torch.full((2,), float(step))}, tmp_path / f"model step={step}.safetensors")
    folders = tmp_path / "trainer"
    for step in (20, 100):
        (folders / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"a": torch.full((2,), float(step))}, folders / f"checkpoint-{step}" / "model.safetensors")
    (folders / "config.json").write_text('{"model_type": "gpt2"}')
    (folders / "checkpoint-200").mkdir()
    with serving(tmp_path) as (address, traffic):
        files = find_checkpoints(f"{address}/")
        assert [checkpoint.step for checkpoint in files] == [90, 1000]
        assert [checkpoint.name for checkpoint in files] == ["model step=90.safetensors", "model step=1000.safetensors"]
        assert open_weights(files[0].address).read(["a"])["a"].tolist() == [90, 90]
        run = find_run(f"{address}/trainer")
        assert [checkpoint.step for checkpoint in run.checkpoints] == [20, 100]
        assert run.left_out == {"checkpoint-200": "holds no weights (yet)"}
        file = open_weights(run.checkpoints[1].address)
        assert file.config == {"model_type": "gpt2"}
        assert file.read(["a"])["a"].tolist() == [100, 100]
        for signs in (True, False):
            traffic.signs = signs
            before = [checkpoint.fingerprint() for checkpoint in run.checkpoints]
            assert len(set(before)) == 2
            assert [checkpoint.fingerprint() for checkpoint in run.checkpoints] == before
        save_file({"a": torch.full((2,), 21.0)}, folders / "checkpoint-20" / "model.safetensors")
        assert run.checkpoints[0].fingerprint() != before[0]
        assert run.checkpoints[1].fingerprint() == before[1]


@pytest.mark.parametrize(
    ("path", "status", "kind", "message"),
    [
        ("none.safetensors", None, CallError, "none.safetensors does not exist"),
        ("none/", None, CallError, "none/ does not exist"),
        ("a.safetensors", 500, QkovError, r"a.safetensors cannot be read \(500"),
        ("a.safetensors", 503, QkovError, r"a.safetensors cannot be read \(503"),
        ("a/", 500, QkovError, r"a/ cannot be read \(500"),
    ],
)
def test_a_web_server_that_does_not_have_it(tmp_path, monkeypatch, path, status, kind, message):
    without_waiting(monkeypatch)
    with serving(tmp_path) as (address, traffic):
        traffic.fails = status
        for call in (open_weights, find_checkpoints):
            with pytest.raises(kind, match=message) as caught:
                call(f"{address}/{path}")
            assert isinstance(caught.value, CallError) == (kind is CallError)
            one_line(caught)


def test_a_server_that_is_not_there(tmp_path):
    with serving(tmp_path) as (address, _):
        pass
    for path in ("a.safetensors", "a/"):
        with pytest.raises(QkovError, match=r"cannot be (reached|read) \(Cannot connect to host") as caught:
            open_weights(f"{address}/{path}")
        assert not isinstance(caught.value, CallError)
        one_line(caught)


def test_a_server_that_goes_away_in_the_middle(tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / "a.safetensors")
    with serving(tmp_path) as (address, traffic):
        file = open_weights(f"{address}/a.safetensors")
        traffic.hangs_up = True
        with pytest.raises(QkovError, match=r"a.safetensors cannot be read \(Server disconnected\)") as caught:
            file.read(["a"])
    one_line(caught)


def test_any_address_of_fsspec_is_a_place(tmp_path, memory):
    tensors = model(layers=1) | {"of no size": torch.zeros(3, 0), "scalar": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    for step in (500, 1000):
        memory.put(str(tmp_path / "model.safetensors"), f"/run/checkpoint-{step}/model.safetensors")
    memory.pipe("/run/checkpoint-500/trainer_state.json", b'{"log_history": [{"step": 500, "loss": 2.0}]}')
    memory.pipe("/run/checkpoint-700/optimizer.pt", b"")
    run = find_run("memory://run")
    assert [(each.step, each.address) for each in run.checkpoints] == [
        (500, "memory://run/checkpoint-500"),
        (1000, "memory://run/checkpoint-1000"),
    ]
    assert list(run.left_out) == ["checkpoint-700"]
    file = open_weights(run.checkpoints[0].address)
    assert file.scalars == {"scalar": 1.5, "loss": 2.0}
    for name, tensor in file.read(list(tensors)).items():
        assert torch.equal(tensor, tensors[name])
    before = run.checkpoints[0].fingerprint()
    assert run.checkpoints[0].fingerprint() == before
    memory.pipe("/run/checkpoint-500/trainer_state.json", b"{}")
    assert run.checkpoints[0].fingerprint() != before
    with pytest.raises(CallError, match=r"memory://none does not exist"):
        find_checkpoints("memory://none")


def test_a_truncated_remote_file_is_reported_before_its_tensors_are_read(tmp_path, memory):
    save_file({"a": torch.ones(1000)}, tmp_path / "a.safetensors")
    memory.pipe("/a.safetensors", (tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(QkovError, match=r"memory://a.safetensors cannot be read as safetensors .* its tensors end at"):
        open_weights("memory://a.safetensors")
    memory.pipe("/b.safetensors", b"")
    with pytest.raises(QkovError, match=r"memory://b.safetensors is empty"):
        open_weights("memory://b.safetensors")


def test_an_archive_is_a_place(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    archive = fsspec.filesystem("zip", fo=str(tmp_path / "run.zip"), mode="w")
    for step in (7, 30):
        archive.put(str(tmp_path / "model.safetensors"), f"checkpoint-{step}/model.safetensors")
    archive.close()
    checkpoints = find_checkpoints(f"zip://::{tmp_path}/run.zip")
    assert [each.step for each in checkpoints] == [7, 30]
    assert open_weights(checkpoints[0].address).read(["a"])["a"].tolist() == [1, 1, 1]


def test_a_driver_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CallError, match=r"s3://bucket/run needs a driver for s3://.*: pip install s3fs") as caught:
        find_checkpoints("s3://bucket/run")
    one_line(caught)
    with pytest.raises(CallError, match=r"foo://x cannot be understood \(Protocol not known: foo\)"):
        open_weights("foo://x")


def test_a_local_path_is_never_taken_for_a_model_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert isinstance(place_of("runs/mine"), LocalPlace)
    assert isinstance(place_of("runs/mistyped"), LocalPlace)
    assert isinstance(place_of(Path("EleutherAI/pythia-160m")), LocalPlace)
    assert isinstance(place_of("./EleutherAI/pythia-160m"), LocalPlace)
    assert isinstance(place_of("one/two/three"), LocalPlace)
    assert place_of(f"file://{tmp_path}").address == str(tmp_path)
    assert place_of("EleutherAI/pythia-160m@step1000").address == "hf://EleutherAI/pythia-160m@step1000"
    assert place_of("EleutherAI/pythia-160m").address == "hf://EleutherAI/pythia-160m"


def test_nothing_heavy_is_imported_for_local_paths(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    script = (
        "import sys; from qkov.circuits import find_checkpoints; "
        "from qkov.circuits.checkpoints.opening import open_weights; "
        f"open_weights(find_checkpoints({str(tmp_path)!r})[0].address).read(['a']); "
        "heavy = {'huggingface_hub', 'aiohttp', 'transformers', 'yaml', 'matplotlib', 'pandas', 's3fs', "
        "'fsspec.implementations.http'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ranges", "requests"),
    [
        ([], []),
        ([(0, 10)], [((0, 10), [0])]),
        ([(10, 20), (0, 10)], [((0, 20), [1, 0])]),
        ([(0, 100), (105, 200)], [((0, 200), [0, 1])]),
        ([(0, 100), (111, 200)], [((0, 100), [0]), ((111, 200), [1])]),
        # 200 bytes are wanted: gaps of 4 and 6 are bridged, one more of 8 is not.
        ([(0, 50), (58, 108), (112, 162), (168, 218)], [((0, 50), [0]), ((58, 218), [1, 2, 3])]),
        ([(0, 600), (600, 1100), (1100, 1200)], [((0, 600), [0]), ((600, 1200), [1, 2])]),
        ([(5, 5), (5, 9)], [((5, 9), [1])]),
    ],
)
def test_ranges_are_merged_within_the_slack(ranges, requests):
    assert merged(ranges, slack=0.05, largest=1000) == requests
