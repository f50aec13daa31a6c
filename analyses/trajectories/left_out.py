"""Checkpoints that cannot be measured: which one is at fault, and why, so that the others can be measured."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.errors import CallError, QkovError, reason

Item = TypeVar("Item")


@dataclass(frozen=True)
class LeftOut:
    """A checkpoint that cannot be measured.

    Attributes:
        step: The step of the checkpoint; None for that of a single checkpoint that is not known.
        why: The reason, in one line.
        wrong_call: Whether the call rather than the checkpoint may be at fault.
    """

    step: int | None
    why: str
    wrong_call: bool = False

    def error(self) -> QkovError:
        """Return the reason as an error."""
        return CallError(self.why) if self.wrong_call else QkovError(self.why)


class UnusableCheckpointError(Exception):
    """A checkpoint cannot be measured.

    Attributes:
        left_out: Which one, and why.
    """

    def __init__(self, left_out: LeftOut) -> None:
        """Store the checkpoint and the reason."""
        super().__init__(left_out.why)
        self.left_out = left_out


def left_out_for(checkpoint: Checkpoint, error: Exception) -> LeftOut:
    """Return a checkpoint as one that is left out because of an error.

    Args:
        checkpoint: The checkpoint.
        error: What was raised when it was read or measured.
    """
    why = str(error) if isinstance(error, QkovError) else f"{type(error).__name__}: {reason(error)}"
    return LeftOut(checkpoint.step, why, isinstance(error, CallError))


@contextmanager
def blaming(checkpoint: Checkpoint) -> Iterator[None]:
    """Attribute the errors of a block to a checkpoint, unless they are attributed already.

    Lack of memory is the fault of no checkpoint.

    Args:
        checkpoint: The checkpoint that the block reads.

    Raises:
        UnusableCheckpointError: The block raised an error.
    """
    try:
        yield
    except (UnusableCheckpointError, MemoryError):
        raise
    except Exception as error:
        raise UnusableCheckpointError(left_out_for(checkpoint, error)) from error


def blamed(items: Iterable[Item], checkpoint: Checkpoint) -> Iterator[Item]:
    """Yield items that are read from a checkpoint, and attribute errors of reading them to it.

    Args:
        items: The items.
        checkpoint: The checkpoint.
    """
    iterator = iter(items)
    while True:
        with blaming(checkpoint):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
