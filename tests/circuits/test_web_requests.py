"""Requests to web servers that are busy, refuse, lie or send on."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import BytesIO

import pytest
import torch
from qkov.circuits import CallError, QkovError, find_checkpoints
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.storage import web_requests
from qkov.circuits.storage.web_requests import asked_pause
from safetensors.torch import save

from .scripted_server import Answer, Request, answering, without_waiting

WEIGHTS = save({"a": torch.arange(100.0)})


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    return without_waiting(monkeypatch)


def refusal(address: str) -> str:
    with pytest.raises(QkovError) as refused:
        open_weights(address).read(["a"])
    message = str(refused.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 599])
def test_a_busy_server_is_asked_again_after_longer_and_longer_pauses(pauses, status):
    busy = 3

    def answer(request: Request) -> Answer:
        nonlocal busy
        if request.path.startswith("/a.safetensors") and busy:
            busy -= 1
            return Answer(status)
        return Answer(content=WEIGHTS) if request.path == "/a.safetensors" else Answer(404)

    with answering(answer) as (address, _):
        assert open_weights(f"{address}/a.safetensors").read(["a"])["a"].tolist() == list(range(100))
    assert pauses == [1, 2, 4]


@pytest.mark.parametrize("dated", [True, False])
def test_a_server_that_says_how_long_to_wait_is_obeyed(pauses, dated):
    stated = format_datetime(datetime.now(UTC) + timedelta(seconds=50), usegmt=True) if dated else "50"
    answers = [Answer(503, headers={"Retry-After": stated})]

    def answer(request: Request) -> Answer:
        return answers.pop() if answers else Answer(content=WEIGHTS) if "/a." in request.path else Answer(404)

    with answering(answer) as (address, _):
        open_weights(f"{address}/a.safetensors")
    assert pauses == [pytest.approx(50, abs=10 if dated else 0)]


def test_the_date_of_a_pause(monkeypatch):
    assert asked_pause({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    for nonsense in ("", "soon", "-5", "1e3", "²", "Wed, 99 Oct 2015"):
        assert asked_pause({"Retry-After": nonsense}) is None
    assert asked_pause(None) is None


def test_a_server_that_stays_busy_is_given_up_at_the_deadline(pauses):
    with answering(lambda _: Answer(503, b"<html>busy</html>")) as (address, requests):
        message = refusal(f"{address}/a.safetensors")
        assert message == (
            f"{address}/a.safetensors cannot be read (503 Service Unavailable, also after repeated requests; "
            f"try again later)"
        )
        assert pauses[:7] == [1, 2, 4, 8, 16, 30, 30]
        count = len(requests)
        # The next file is not waited for as long again.
        refusal(f"{address}/b.safetensors")
    assert sum(pauses) <= web_requests.DEADLINE
    assert len(requests) < 2 * count


def test_a_pause_beyond_the_deadline_is_told_and_not_waited_for(pauses):
    with answering(lambda _: Answer(429, headers={"Retry-After": "3600"})) as (address, _):
        message = refusal(f"{address}/a.safetensors")
    assert "429 Too Many Requests" in message
    assert "asks for a pause of 3600 s" in message
    assert pauses == []


@pytest.mark.parametrize("status", [501, 505, 400, 418])
def test_what_will_not_change_is_not_asked_again(pauses, status):
    with answering(lambda _: Answer(status)) as (address, _):
        assert f"cannot be read ({status}" in refusal(f"{address}/a.safetensors")
    assert pauses == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "401 Unauthorized: the server asks for a login; put USER:PASSWORD@ before its name"),
        (403, "403 Forbidden: the server refuses access, or has no such file; a signed link may have expired"),
    ],
)
@pytest.mark.parametrize("call", [open_weights, find_checkpoints])
@pytest.mark.parametrize("path", ["a.safetensors", "run/"])
def test_a_refused_access_is_named(pauses, status, words, call, path):
    with (
        answering(lambda _: Answer(status, b"\x00\x80 secret page")) as (address, _),
        pytest.raises(QkovError) as refused,
    ):
        call(f"{address}/{path}")
    assert str(refused.value).startswith(f"{address}/{path} cannot be read ({words}")
    assert not isinstance(refused.value, CallError)


def test_files_beside_the_weights_that_a_server_does_not_show_are_not_there(pauses):
    with answering(lambda request: Answer(content=WEIGHTS) if "/a." in request.path else Answer(403)) as (address, _):
        assert open_weights(f"{address}/a.safetensors").config is None


@pytest.mark.parametrize("phrase", ["Gone \x1b[31m fishing", "b'\\xff\\xfe'", "<b>no</b>"])
def test_what_a_server_says_of_its_status_is_not_repeated(pauses, phrase):
    with answering(lambda _: Answer(418, phrase=phrase)) as (address, _):
        assert refusal(f"{address}/a.safetensors") == f"{address}/a.safetensors cannot be read (418 I'm a Teapot)"


def test_a_server_that_speaks_no_http(pauses):
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def speak() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\xff\x1bSSH-2.0 raw bytes \x80\r\n\r\n")

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        message = refusal(f"http://127.0.0.1:{listener.getsockname()[1]}/a.safetensors")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert "\\x" not in message
    assert "SSH" not in message


def test_a_redirection_to_another_host_is_told_and_gets_no_password(pauses):
    def forbidden(request: Request) -> Answer:
        return Answer(403)

    with answering(forbidden) as (other, asked_there):
        target = other.replace("127.0.0.1", "localhost")
        with answering(lambda _: Answer(302, headers={"Location": f"{target}/b?sig=x"})) as (address, asked):
            given = address.replace("//", "//user:hunter2@")
            message = refusal(f"{given}/a.safetensors?token=SECRET")
    assert message.endswith(f"; the server sent the request on to {target.removeprefix('http://')}")
    assert all("Authorization" in request.headers for request in asked)
    assert asked_there
    assert not any("Authorization" in request.headers for request in asked_there)
    for secret in ("hunter2", "SECRET", "user"):
        assert secret not in message


def test_a_redirection_on_the_same_host_is_no_news(pauses):
    def answer(request: Request) -> Answer:
        return Answer(302, headers={"Location": "/b.safetensors"}) if "/a." in request.path else Answer(418)

    with answering(answer) as (address, _):
        assert "sent the request on" not in refusal(f"{address}/a.safetensors")


def test_a_copy_is_given_time_by_its_size():
    assert web_requests.allowed_time().total == 600
    assert web_requests.allowed_time(10**9).total == pytest.approx(600 + 1e5)
    assert web_requests.allowed_time().sock_read == 60


def test_a_remote_torch_file_is_copied(pauses):
    content = BytesIO()
    torch.save({"a": torch.ones(3)}, content)
    with answering(lambda request: Answer(content=content.getvalue()) if "/a." in request.path else Answer(404)) as (
        address,
        _,
    ):
        assert open_weights(f"{address}/a.pt").read(["a"])["a"].tolist() == [1, 1, 1]
