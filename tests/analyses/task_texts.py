"""What tests ask of a task whose examples are texts."""

from qkov.analyses.tasks import Task, TextExample


def texts(task: Task) -> list[TextExample]:
    found = [example for example in task.examples if isinstance(example, TextExample)]
    assert len(found) == len(task.examples)
    return found


def label(example) -> int:
    assert example.label is not None
    return example.label


def marked(example: TextExample) -> list[list[str]]:
    return [[example.text[start:end] for start, end in spans] for spans in example.relevant]
