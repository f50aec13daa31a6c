"""What a file holds beside the layers that are read from it."""

from collections.abc import Iterable

from ..checkpoints.tensor_file import TensorFile

#: How many single objects are named; a file may hold thousands.
_NAMED = 12


def what_is_not_read(file: TensorFile, used: Iterable[str]) -> dict[str, str]:
    """Return the containers of a file from which no layer is read, and the objects that cannot be read.

    Args:
        file: The file.
        used: Names of the tensors from which layers are read.

    Returns:
        What each of them holds, by its name.
    """
    used = set(used)
    held: dict[str, str] = {}
    for container in file.containers:
        inside = sum(name.startswith(f"{container}.") for name in file.shapes)
        if not any(name.startswith(f"{container}.") for name in used):
            held[container] = f"{inside} tensor{'s' * (inside != 1)}"
    objects = {name: why for name, why in file.unread.items() if not any(name.startswith(f"{each}.") for each in held)}
    shown = dict(list(objects.items())[:_NAMED])
    rest = len(objects) - len(shown)
    return held | shown | ({"others": f"{rest} more objects"} if rest else {})
