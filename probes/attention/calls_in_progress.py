"""The calls of a model that have begun and not ended, and those that a probe leaves out, with the reasons."""

import threading
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from .batch import WatchedBatch

_FAILED = "ended by an error"
_AT_ONCE = "ran at once in several threads"
_INTERRUPTED = "had another call of the model inside"
_UNFINISHED = "had not ended when the probe stopped watching"


@dataclass(eq=False)
class OpenCall:
    """A call that is in progress.

    Attributes:
        batch: What it has given so far.
        held: The context in which it runs.
        is_apart: Whether it is a call of the part that a library calls by itself.
        thread: The thread that it runs in.
        left_out: Why it will not be counted; None if it will.
    """

    batch: WatchedBatch
    held: AbstractContextManager[None]
    is_apart: bool = False
    thread: int = field(default_factory=threading.get_ident)
    left_out: str | None = None


class CallsInProgress:
    """The calls in progress, of which a probe counts those that ran alone and to their end.

    What a source of maps knows of a call (such as which layer comes next) is of one call at a time. Of several calls at
    once none is counted; of a call inside another one, the inner one is.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self._lock = threading.Lock()
        self._open: list[OpenCall] = []
        self._left_out: Counter[str] = Counter()

    def begin(self, call: OpenCall) -> None:
        """Note that a call has begun, and enter its context.

        Args:
            call: The call.
        """
        with self._lock:
            for other in self._open:
                is_nested = other.thread == call.thread
                other.left_out = other.left_out or (_INTERRUPTED if is_nested else _AT_ONCE)
                call.left_out = call.left_out if is_nested else _AT_ONCE
            self._open.append(call)
        call.held.__enter__()

    def current(self) -> OpenCall | None:
        """Return the innermost call of this thread; None if there is none."""
        thread = threading.get_ident()
        return next((call for call in reversed(self._open) if call.thread == thread), None)

    def end(self) -> WatchedBatch | None:
        """End the innermost call of this thread, and return what it gave; None if it is not to be counted."""
        call = self._close()
        if call is None:
            return None
        if call.left_out is not None:
            self._note(call.left_out)
            return None
        return call.batch

    def fail(self) -> None:
        """End the innermost call of this thread, which ended by an error."""
        call = self._close()
        if call is not None:
            self._note(call.left_out or _FAILED)

    def drop(self) -> None:
        """End the innermost call of this thread, which was not asked for."""
        self._close()

    def note_failure(self) -> None:
        """Note that a call that has ended could not be counted because of an error."""
        self._note(_FAILED)

    def stop(self) -> None:
        """End all calls, since nobody watches them any more."""
        with self._lock:
            unfinished, self._open = self._open, []
        for call in unfinished:
            call.held.__exit__(None, None, None)
            self._note(call.left_out or _UNFINISHED)

    def forget(self) -> None:
        """Forget which calls were left out."""
        with self._lock:
            self._left_out.clear()

    def in_words(self) -> str:
        """Return how many calls were left out and why; empty if none was."""
        with self._lock:
            counts = dict(self._left_out)
        return "; ".join(
            f"{count} {'call' if count == 1 else 'calls'} {reason}, and {'is' if count == 1 else 'are'} not counted"
            for reason, count in counts.items()
        )

    def _close(self) -> OpenCall | None:
        with self._lock:
            call = self.current()
            if call is not None:
                self._open.remove(call)
        if call is not None:
            call.held.__exit__(None, None, None)
        return call

    def _note(self, reason: str) -> None:
        with self._lock:
            self._left_out[reason] += 1
