"""The errors that qkov raises: the work failed, or the call was wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

from .public_addresses import without_secrets
from .visible_text import visible

#: How much of another library's message is repeated; some quote the input.
_LONGEST_REASON = 300


class QkovError(Exception):
    """The work could not be done.

    The message is one line. It names the thing, what was expected, what was received and what to do next.
    """

    def __init__(self, message: object = "") -> None:
        """Store the message, without the secrets of the addresses in it.

        Characters of an input's name that would end or hide the line are shown as escapes.
        """
        super().__init__(visible(without_secrets(str(message))))


class CallError(QkovError, ValueError):
    """The call itself was wrong: an argument, a path or a mapping. The command line exits with status 2."""


def reason(error: BaseException) -> str:
    """Return what an error of another library says, in one line."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.strerror and text.startswith("[Errno"):
        text = error.strerror
    first = visible(text.splitlines()[0]) if text else type(error).__name__
    # A KeyError says nothing but the key.
    said = f"{type(error).__name__}: {first}" if isinstance(error, LookupError) and text else first
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]} ..."


@contextmanager
def named_input(
    name: object, expected: str, remedy: str = "copy it again", refusal: type[QkovError] = QkovError
) -> Iterator[None]:
    """Turn whatever a library raises while it reads an input into one line that names the input.

    Every call of a library that parses an input of the user's is made within this context, since no library says all
    that it may raise. Errors of qkov itself pass, with the name of the input in front if they do not hold it.

    Args:
        name: The input, such as a path or an address.
        expected: What the input should be, such as "JSON".
        remedy: What to do about it.
        refusal: The error to raise: `CallError` for an input that belongs to the call, such as a mapping.

    Raises:
        QkovError: A library raised an error, or qkov itself did.
    """
    try:
        yield
    except QkovError as error:
        if visible(str(name)) in str(error):
            raise
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise refusal(f"{name} cannot be read as {expected} ({reason(error)}); {remedy}") from error
