"""Examples with relevant tokens: where they come from, and how they reach a model.

    from qkov.analyses.tasks import TASKS, load_task

    sorted(TASKS)  # the tasks that can be loaded
    task = load_task("agreement", limit=100, seed=0)
    task.examples[0].text, task.relevant  # an example, and what its relevant tokens are

The names in groups:

    Loading                 load_task, TASKS
    Examples                Task, Example (tokens), TextExample (text, to be encoded by a tokenizer)
    From text to tokens     encode, encode_task
"""

from typing import TYPE_CHECKING

from ...circuits.public_names import lazy_face

if TYPE_CHECKING:
    from .encoding import encode, encode_task
    from .example import Example, Task, TextExample
    from .loading import TASKS, load_task

__all__ = ["TASKS", "Example", "Task", "TextExample", "encode", "encode_task", "load_task"]

__getattr__, __dir__ = lazy_face(__name__)
