"""One description of a model on a task: every measure, as tables and files."""
