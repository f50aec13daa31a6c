"""The errors that qkov raises: the work failed, or the call was wrong."""


class QkovError(Exception):
    """The work could not be done.

    The message names the thing, what was expected, what was received and what to do next.
    """


class CallError(QkovError, ValueError):
    """The call itself was wrong: an argument, a path or a mapping. The command line exits with status 2."""


def reason(error: BaseException) -> str:
    """Return what an error of another library says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
