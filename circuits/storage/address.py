"""Find the place that a path, a URL, a hub id or a name of TransformerLens stands for."""

import re
from pathlib import Path
from typing import Any

from ..errors import CallError, QkovError, reason
from ..public_addresses import public_address, without_secrets
from .lens import is_lens, lens_model
from .places import LocalPlace, Place
from .remote import RemotePlace
from .remote_names import refusal_of

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(?:://|::)")
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+(@[^\s/]+)?")


def place_of(address: Path | str | Place) -> Place:
    """Return the place of a path, an fsspec address, or a hub id that is not a local path.

    Args:
        address: A path; an address such as `s3://bucket/run`; `organisation/model` or `organisation/model@revision`;
            `lens:NAME` or `lens:NAME@LABEL`; or a place, which is returned unchanged.

    Raises:
        CallError: The kind of address is unknown, or its driver is not installed.
        QkovError: The driver cannot be set up.
    """
    if isinstance(address, Place):
        return address
    if isinstance(address, Path):
        return LocalPlace(address)
    if is_lens(address):
        return _place_of_lens(address)
    # A double colon alone does not make a name an address.
    if "://" in address and _PROTOCOL.match(address):
        for local in ("file://", "local://"):
            if address.startswith(local):
                return LocalPlace(Path(address.removeprefix(local)))
        return remote_place(address)
    path = Path(address)
    # A mistyped path in an existing folder is not meant for the hub.
    if _HUB_ID.fullmatch(address) and not path.exists() and not Path(path.parts[0]).is_dir():
        return remote_place(f"hf://{address}", f"; there is no local path {address}, either")
    return LocalPlace(path)


def _place_of_lens(address: str) -> Place:
    """Return the place of a model that TransformerLens names; its own format is not for others to read."""
    model = lens_model(address)
    if model.in_own_format:
        raise CallError(
            f"{model} ({model.official}) is in TransformerLens' own format, which only TransformerLens reads: load it "
            f"and give open_model the model; qkov inspect, track and explain do that by themselves"
        )
    return remote_place(model.hub_address())


def remote_place(address: str, hint: str = "") -> Place:
    """Return the place of an fsspec address.

    Args:
        address: The address with its protocol.
        hint: What to add to the message if nothing is found.

    Raises:
        CallError: The kind of address is unknown, or its driver is not installed.
        QkovError: The driver cannot be set up.
    """
    # fsspec and its drivers are slow to import, and most checkpoints are local.
    from .web import WebPlace, web_options

    protocol = address.split("::", 1)[0].split("://", 1)[0]
    is_web = protocol in ("http", "https")
    shown = public_address(address)
    opened = _file_system(address, protocol, web_options() if is_web else {})
    if isinstance(opened, QkovError):
        raise opened
    place = (WebPlace if is_web else RemotePlace)(*opened, address)
    refusal = refusal_of(place.name) if place.name else None
    if refusal is not None:
        raise CallError(f"the last part of {shown} {refusal}; expected the name of a file or a folder")
    place.hint = hint
    return place


def _file_system(address: str, protocol: str, options: dict[str, Any]) -> tuple[Any, str] | QkovError:
    """Return the file system of an address and the path in it, or why there is none.

    The error is returned rather than raised here, so that it does not carry the driver's error, which may hold secrets.
    """
    import fsspec
    from fsspec.registry import known_implementations

    shown = public_address(address)
    try:
        return fsspec.url_to_fs(address, **options)
    except ImportError as error:
        driver = known_implementations.get(protocol, {}).get("class", "fsspec").split(".")[0]
        install = f"pip install {driver}" if driver != "fsspec" else str(error)
        return CallError(f"{shown} needs a driver for {protocol}:// that is not installed: {install}")
    except ValueError as error:
        return CallError(
            f"{shown} cannot be understood ({without_secrets(reason(error), address)}); "
            f"expected a path, or an address such as s3://, hf:// or https://"
        )
    except Exception as error:  # drivers raise errors of their own, such as for credentials
        return QkovError(f"{shown} cannot be reached ({without_secrets(reason(error), address)})")
