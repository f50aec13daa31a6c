"""An explanation of a model on a task: every measure and method on the same examples, as tables and files."""
