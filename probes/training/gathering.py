"""Parameters that are spread over processes (DTensor, as by fully_shard) are gathered, by all processes together."""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ...circuits.checkpoints.tensor_file import in_memory
from ...circuits.errors import CallError, QkovError

#: How long a process waits for the others, since a probe that some of them lack would stop training for good.
PATIENCE = timedelta(minutes=3)


class Gathering:
    """Brings tensors together that processes share; each process has to ask for the same tensors at the same step.

    Before any tensor is gathered, the processes tell each other at which step they are and what they gather. If they
    differ, or one of them does not answer in time, all of them raise, nothing more is gathered, and training goes on.

    Attributes:
        is_first: Whether this process gets the values; the others only take part.
    """

    def __init__(self, ranks: list[int]) -> None:
        """Connect the processes. All of them have to do this at once.

        Args:
            ranks: The ranks of the processes that share the tensors.

        Raises:
            QkovError: Not all of them do.
        """
        self.is_first = distributed.get_rank() == 0
        self._failure: str | None = None
        self._ranks = ranks
        try:
            self._group = distributed.new_group(ranks, timeout=PATIENCE, backend="gloo", use_local_synchronization=True)
        except RuntimeError as error:
            raise QkovError(self._silence(error)) from error

    @classmethod
    def of(cls, model: Any) -> "Gathering | None":
        """Return the gathering of a model's parameters; None if no parameter is spread over processes.

        Args:
            model: The model.

        Raises:
            QkovError: As for the constructor.
        """
        spread: Any = next(filter(is_spread, _parameters(model)), None)
        if spread is None:
            return None
        ranks = sorted(spread.device_mesh.mesh.flatten().tolist())
        if 0 not in ranks:
            return None
        gathering = cls(ranks)
        if not gathering.is_first:
            warnings.warn(
                f"this is process {distributed.get_rank()} of {distributed.get_world_size()}: the first one, of rank "
                f"0, measures, and the probe of this one takes part in gathering the weights and writes nothing",
                stacklevel=3,
            )
        return gathering

    def agree(self, statement: str, about: str) -> None:
        """Refuse to go on if the processes state different things.

        Args:
            statement: What this process states.
            about: What it is about, in the plural, for the message.

        Raises:
            QkovError: The processes differ, one of them does not answer, or gathering has ended before.
        """
        if self._failure is not None:
            raise QkovError(self._failure)
        stated: list[Any] = [None] * len(self._ranks)
        try:
            distributed.all_gather_object(stated, statement, group=self._group)
        except RuntimeError as error:
            self._failure = self._silence(error)
            raise QkovError(self._failure) from error
        other = next((place for place, of_other in enumerate(stated) if of_other != stated[0]), None)
        if other is not None:
            self._failure = (
                f"{about} differ between processes ({stated[0]} in process {self._ranks[0]}; {stated[other]} in "
                f"process {self._ranks[other]}): make the same probe in all of them"
            )
            raise QkovError(self._failure)

    @contextmanager
    def concluded(self) -> Iterator[None]:
        """Tell the other processes, at the end of a block, whether it succeeded, so that none goes on alone."""
        reason: str | None = "it was interrupted"
        try:
            yield
            reason = None
        except Exception as error:
            reason = str(error)
            raise
        finally:
            self._tell(reason)

    def demand_concluded(self) -> None:
        """Wait for the block of the first process, and raise if it failed.

        Raises:
            CallError: It failed.
        """
        reason = self._tell(None)
        if reason is not None:
            raise CallError(f"the probe of process 0 could not be made: {reason}")

    def _tell(self, reason: str | None) -> str | None:
        stated: list[Any] = [None] * len(self._ranks)
        distributed.all_gather_object(stated, reason, group=self._group)
        return next((other for other in stated if other is not None), None)

    def gather(self, step: int, tensors: Iterable[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return each tensor with its whole value on the CPU, by the tensor's id; in the first process alone.

        Args:
            step: The step at which they are gathered.
            tensors: The tensors, in the same order in all processes.

        Raises:
            QkovError: The processes differ in the step or the tensors.
        """
        wanted = list({id(tensor): tensor for tensor in tensors}.values())
        shapes = "; ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in wanted)
        self.agree(f"step {step}: {shapes}", "the tensors that are gathered")
        gathered: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor in wanted:
            spread: Any = tensor.detach()
            whole = spread.full_tensor()
            if self.is_first:
                gathered[id(tensor)] = tensor, in_memory(whole, "a gathered weight")
        return gathered

    def _silence(self, error: RuntimeError) -> str:
        # Without the place in torch's own code, and what it says to those who work on it.
        reason = re.sub(r"^\[.*?\] *", "", str(error).partition("\n")[0]).partition(". ")[0]
        return (
            f"not all of the processes {self._ranks} take part in gathering ({reason}): make the "
            f"probe in every process, with the same arguments, and call it alike in all of them"
        )


def is_spread(tensor: object) -> bool:
    """Return whether a tensor is spread over processes."""
    return hasattr(tensor, "full_tensor")


def is_shared(model: Any) -> bool:
    """Return whether processes share a model, each with a part of its parameters."""
    return any(map(is_spread, _parameters(model)))


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process holds; the tensor itself if it is not spread over processes."""
    return tensor.to_local() if is_spread(tensor) else tensor


def stand_in(tensor: Tensor) -> Tensor:
    """Return zeros of the shape and the type of a tensor, without its memory."""
    return torch.zeros((1,) * tensor.ndim, dtype=tensor.dtype).expand(tensor.shape)


def _parameters(model: Any) -> Iterable[nn.Parameter]:
    return model.parameters() if isinstance(model, nn.Module) else ()
