"""The files that DeepSpeed writes at each step, and which of them hold a whole model."""

import re
from fnmatch import fnmatch

from ...storage.places import Place

#: DeepSpeed's script that merges the parts of ZeRO's stages 1 to 3; it fails for a model that is whole.
SCRIPT = "zero_to_fp32.py"
_STATES = ("*_optim_states.pt", "*model_states.pt")


def whole_model(names: list[str]) -> str | None:
    """Return the name of the file that holds a whole model, as ZeRO's stage 0 saves it, or None."""
    states = [name for name in names if any(fnmatch(name, pattern) for pattern in _STATES)]
    return states[0] if states == ["mp_rank_00_model_states.pt"] else None


def parts_in(folder: Place, names: list[str]) -> str | None:
    """Return which parts of a model DeepSpeed wrote into a folder, and what to do about them, or None.

    Args:
        folder: The folder.
        names: The names of its entries.
    """
    states = [name for name in names if any(fnmatch(name, pattern) for pattern in _STATES)]
    if not states:
        if SCRIPT not in names:
            return None
        return f"DeepSpeed's parts of a model; merge them with `python {folder}/{SCRIPT} {folder} OUT`"
    ranks = {found[1] for name in states if (found := re.search(r"mp_rank_(\d+)_", name))}
    if len(ranks) > 1 or any(fnmatch(name, "layer_*-model_states.pt") for name in states):
        return (
            "DeepSpeed's parts of a model that was split over devices by tensor or pipeline parallelism; convert it "
            "to one file with the tools of the code that trained it"
        )
    # DeepSpeed writes its script into the folder that contains the folders of the steps.
    whole = folder if SCRIPT in names else folder.parent or folder
    step = "" if SCRIPT in names else f" --tag {folder.name}"
    merge = f"merge them with `python {whole}/{SCRIPT} {whole} OUT{step}`"
    if "mp_rank_00_model_states.pt" in states:
        return (
            f"DeepSpeed's parts of a model, of ZeRO stage 1 or 2; {merge}, or give the path of "
            f"{folder.child('mp_rank_00_model_states.pt')} to read its copy in half precision"
        )
    return f"DeepSpeed's parts of a model, of ZeRO stage 3 as far as their names say; {merge}"
