"""Which call of an optimizer's step a hook belongs to, where `step` calls that of its base class."""

import sys
from types import FrameType

from torch.optim.optimizer import register_optimizer_step_pre_hook

#: The file whose wrapper around `step` calls the hooks.
_TORCH = register_optimizer_step_pre_hook.__code__.co_filename


def call_of_step() -> FrameType:
    """Return the frame of torch's wrapper around `step`, from which a hook is called; both hooks of a call share it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TORCH:
        frame = frame.f_back
    assert frame is not None, "hooks of optimizers are called by torch"
    return frame


def is_running(frame: FrameType, caller: FrameType) -> bool:
    """Return whether a frame is among the callers of another one; after an error it is not.

    Args:
        frame: The frame that may have ended.
        caller: The frame of the call that is in progress.
    """
    above: FrameType | None = caller
    while above is not None:
        if above is frame:
            return True
        above = above.f_back
    return False
