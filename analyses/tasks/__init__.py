"""Examples with relevant tokens: where they come from, and how they reach a model."""

from .encoding import encode, encode_task
from .example import Example, Task, TextExample
from .loading import TASKS, load_task

__all__ = ["TASKS", "Example", "Task", "TextExample", "encode", "encode_task", "load_task"]
