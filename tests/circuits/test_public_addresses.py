"""Addresses as they may be shown and stored, and what they are recognised by."""

import pickle

import pytest
from qkov.circuits import CallError, QkovError
from qkov.circuits.public_addresses import identity, public_address, without_secrets
from qkov.circuits.storage.address import place_of

SIGNED = (
    "https://bucket.s3.amazonaws.com/run/m.safetensors?X-Amz-Algorithm=AWS4&X-Amz-Credential=AKIA%2F2026&"
    "X-Amz-Date={date}&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature={signature}"
)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("http://user:hunter2@host/m.pt?token=SECRET", "http://host/m.pt?..."),
        ("https://TOKEN@host:8443/a/", "https://host:8443/a/"),
        ("https://user:a@b@host/x", "https://host/x"),
        ("https://user:a/b@host/x", "https://host/x"),
        ("ftp://user:pw@[::1]:21/x", "ftp://[::1]:21/x"),
        ("sftp://me:pw@host/x#frag?ment", "sftp://host/x"),
        ("s3://KEY:SECRET@bucket/run", "s3://bucket/run"),
        ("zip://run::https://u:p@host/a.zip?sig=5", "zip://run::https://host/a.zip?..."),
        ("simplecache::s3://K:S@bucket/run", "simplecache::s3://bucket/run"),
        (SIGNED.format(date=1, signature=2), "https://bucket.s3.amazonaws.com/run/m.safetensors?..."),
        ("https://h/m.pt?versionId=7&sig=x", "https://h/m.pt?versionId=7&..."),
        ("https://h/m.pt?alt=media", "https://h/m.pt?alt=media"),
        ("https://h/get?file=run/m_step_5.pt", "https://h/get?file=run/m_step_5.pt"),
        ("https://h/get?file=https://u:p@h/x", "https://h/get?..."),
        ("https://h/x?SECRET", "https://h/x?..."),
        ("HTTPS://User:Pw@Host/x?A_TOKEN=b;raw=1", "HTTPS://Host/x?raw=1&..."),
        # Nothing here is a secret.
        *(
            (same, same)
            for same in (
                *("https://host/a@1.0/m.pt", "hf://org/model@main", "hf://gpt2@step1", "org/model@main", "/a/b?c=d@e"),
                *(
                    "abfs://container@account.dfs.core.windows.net/run",
                    "github://org:repo@v1/x",
                    "memory://run",
                    "C:\\x",
                ),
                *("http://[::1]:80/x", "https://host:80/x@y", "tcp://10.0.0.1:8786", "a::b", "https://h/x?..."),
            )
        ),
    ],
)
def test_what_is_shown_of_an_address(address, public):
    assert public_address(address) == public
    assert public_address(public) == public


def test_a_new_signature_leaves_the_identity():
    signed = [SIGNED.format(date=date, signature=f"f{date}") for date in (1, 2)]
    assert identity(signed[0]) == identity(signed[1])
    assert identity("https://a:1@h/x?token=1") == identity("https://b:2@H/x?token=2") == identity("https://h/x")
    azure = "https://acc.blob.core.windows.net/c/m.pt?sv={0}&se={0}&sr=b&sp=r&sig={0}"
    assert identity(azure.format(1)) == identity(azure.format(2))
    google = "https://storage.googleapis.com/b/m.pt?X-Goog-Signature={0}&X-Goog-Date={0}"
    assert identity(google.format(1)) == identity(google.format(2))
    front = "https://cdn.net/m.pt?Expires={0}&Policy={0}&Signature={0}&Key-Pair-Id=K"
    assert identity(front.format(1)) == identity(front.format(2))


@pytest.mark.parametrize(
    "other",
    [
        *("https://h/y?id=1", "https://g/x?id=1", "http://h/x?id=1", "https://h:8/x?id=1", "https://h/x?id=2"),
        *("https://h/X?id=1", "https://h/x?key=1", "https://h/x?se=1", "https://h/x?id=1&versionId=3"),
    ],
)
def test_another_thing_has_another_identity(other):
    assert identity(other) != identity("https://h/x?id=1")


def test_the_identity_is_a_hash():
    assert len(identity("https://h/x")) == 32
    assert int(identity("https://h/x"), 16)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (
            "404, message='Not Found', url='http://user:pw@h/x?token=abc'",
            "404, message='Not Found', url='http://h/x?...'",
        ),
        ("cannot reach (http://u:p@h/x?sig=1).", "cannot reach (http://h/x?...)."),
        ("a <https://u:p@h/> b", "a <https://h/> b"),
        ("Authorization: Bearer hf_abcdefghijkl", "Authorization: Bearer hf_..."),
        ("see https://docs.python.org/3/, please", "see https://docs.python.org/3/, please"),
        ("no address: a::b, C:\\x, 5//3", "no address: a::b, C:\\x, 5//3"),
    ],
)
def test_texts_of_others_are_cleaned(text, cleaned):
    assert without_secrets(text) == cleaned
    assert str(QkovError(text)) == cleaned.replace("\\", "\\")


def test_the_secrets_of_an_address_are_removed_wherever_they_stand():
    address = "http://user:hunter2@h/x?token=SE%20CRET&alt=media&n=1"
    text = without_secrets("GET /x?token=SE%20CRET for user:hunter2 (hunter2), SE CRET, media, n=1", address)
    assert text == "GET /x?token=... for ... (...), ..., media, n=1"


def test_a_place_shows_its_public_address_and_keeps_the_other():
    place = place_of("http://user:hunter2@127.0.0.1:1/run/m.pt?token=SECRET")
    assert str(place) == place.address == "http://127.0.0.1:1/run/m.pt?..."
    assert "hunter2" not in repr(place)
    assert place.name == "m.pt"
    assert pickle.loads(pickle.dumps(place)).location == place.location
    assert place.parent.address == "http://127.0.0.1:1/run/"
    assert place.parent.location == "http://user:hunter2@127.0.0.1:1/run/"
    assert place.parent.child("x").location == "http://user:hunter2@127.0.0.1:1/run/x"


@pytest.mark.parametrize("address", ["foo://u:pw@h/x?token=SECRET", "s3://KEY:pw@bucket/SECRET"])
def test_an_address_that_cannot_be_understood_keeps_its_secrets(address, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(CallError) as refused:
        place_of(address)
    assert "pw" not in str(refused.value)
    assert "KEY" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None
