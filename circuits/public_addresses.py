"""What may be shown and stored of an address: neither passwords nor tokens nor signatures."""

import hashlib
import re
from collections.abc import Iterator
from urllib.parse import unquote

#: An address in a text. What closes a sentence or a bracket around it is no part of it.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://[^\s'\"<>]+?(?=[)\]},.;:!]*(?:[\s'\"<>]|$))")
_PARTS = re.compile(
    r"(?P<protocol>[A-Za-z][A-Za-z0-9+.\-]+)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?:#.*)?",
    re.DOTALL,
)
#: Protocols in which what precedes an @ names the thing: a model of a hub, a container, a repository.
_NAMED_BEFORE_AT = ("hf", "abfs", "abfss", "wasb", "wasbs", "adl", "az", "github", "git")
#: Tokens of the Hugging Face hub, wherever they stand.
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
#: Parameters that say what is at the address, and that are shown.
_SHOWN = {
    *("versionid", "generation", "alt", "download", "raw", "inline", "ref", "rev", "revision", "branch", "format"),
    *("path", "file", "filename"),
}
_SHOWN_VALUE = re.compile(r"[\w.\-+ /%]{0,200}")
#: Parameters that let somebody in or state until when, and that change whenever an address is signed anew.
_VOLATILE = re.compile(
    r"(x-(amz|goog|ms|oss|cos|obs)-|response-).*|.*(token|secret|passw|pwd|signature|credential|auth|session).*"
    r"|(aws|google|oss)?access(key)?id|api_?key|sig|sign|pw|pass|jwt|policy|key-pair-id|expires?|expiry|exp|hdnts|hdnea"
    r"|hmac|ticket|nonce",
    re.IGNORECASE,
)
#: The further parameters of a shared access signature, which stands in `sig`.
_BESIDE_SIG = {
    *("sv", "ss", "srt", "sp", "se", "st", "spr", "sr", "sip", "si", "sdd", "skoid", "sktid", "skt", "ske", "sks"),
    *("skv", "saoid", "suoid", "scid"),
}
#: What stands for the parameters that are not shown.
_NOT_SHOWN = "..."
#: The shortest value that is looked for in texts; shorter ones are in words by chance.
_SHORTEST = 3


def public_address(address: str) -> str:
    """Return an address without user, password, fragment and those parameters that could be a secret.

    What is not an address with a protocol, such as a path, is returned as it is. In a chain of addresses
    (`zip://a::https://host/b`) each is treated.

    Args:
        address: The address as it was given.
    """
    return "::".join(_public(part) for part in address.split("::")) if "://" in address else address


def identity(address: str) -> str:
    """Return a hash of an address that stays the same when it is signed anew or given with another password.

    Args:
        address: The address as it was given.
    """
    return hashlib.blake2b(
        "::".join(map(_lasting, address.split("::"))).encode(errors="surrogateescape"), digest_size=16
    ).hexdigest()


def without_secrets(text: str, address: str = "") -> str:
    """Return a text with every address in it in its public form.

    Args:
        text: What is to be shown or stored, such as the message of a library.
        address: An address whose password and whose hidden parameters are removed wherever they stand in the text.
    """
    if address:
        for secret in sorted(set(_secrets(address)), key=len, reverse=True):
            text = text.replace(secret, _NOT_SHOWN)
    if "://" in text:
        text = _ADDRESS.sub(lambda match: public_address(match[0]), text)
    return _HUB_TOKEN.sub("hf_...", text)


def _public(address: str) -> str:
    parts = _PARTS.fullmatch(address)
    if parts is None:
        return address
    authority, path = _without_user(parts)
    query = ""
    if parts["query"] is not None:
        parameters = _parameters(parts["query"])
        shown = [parameter for name, value, parameter in parameters if _is_shown(name, value)]
        query = "?" + "&".join(shown + [_NOT_SHOWN] * (len(shown) < len(parameters)))
    return f"{parts['protocol']}://{authority}{path}{query}"


def _lasting(address: str) -> str:
    parts = _PARTS.fullmatch(address)
    if parts is None:
        return address
    authority, path = _without_user(parts)
    parameters = _parameters(parts["query"] or "")
    signed = any(name.lower() == "sig" for name, _, _ in parameters)
    lasting = [
        parameter
        for name, _, parameter in parameters
        if not (_VOLATILE.fullmatch(name) or (signed and name.lower() in _BESIDE_SIG))
    ]
    return f"{parts['protocol'].lower()}://{authority.lower()}{path}?{'&'.join(lasting)}"


def _secrets(address: str) -> Iterator[str]:
    for part in address.split("::"):
        parts = _PARTS.fullmatch(part)
        if parts is None:
            continue
        authority, path = _without_user(parts)
        whole = parts["authority"] + parts["path"]
        user = whole[: len(whole) - len(authority + path)].removesuffix("@")
        hidden = [value for name, value, _ in _parameters(parts["query"] or "") if not _is_shown(name, value)]
        for value in (user, user.partition(":")[2], *hidden):
            yield from (form for form in (value, unquote(value)) if len(form) >= _SHORTEST)


def _without_user(parts: re.Match[str]) -> tuple[str, str]:
    authority, path = parts["authority"], parts["path"]
    if parts["protocol"].lower() in _NAMED_BEFORE_AT:
        return authority, path
    if "@" in authority:
        return authority.rpartition("@")[2], path
    # A password with a slash in it ends what looks like the name of a server.
    port = authority.rpartition(":")[2]
    if ":" in authority and not authority.endswith("]") and not port.isdigit() and port and "@" in path:
        authority, slash, path = path.rpartition("@")[2].partition("/")
        return authority, slash + path
    return authority, path


def _parameters(query: str) -> list[tuple[str, str, str]]:
    """Return the name, the value and the whole of each parameter."""
    whole = [parameter for parameter in re.split("[&;]", query) if parameter]
    return [(unquote(name), value, parameter) for parameter in whole for name, _, value in [parameter.partition("=")]]


def _is_shown(name: str, value: str) -> bool:
    return name.lower() in _SHOWN and _SHOWN_VALUE.fullmatch(value) is not None
