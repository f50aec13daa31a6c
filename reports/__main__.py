"""Run the command `qkov` as `python -m qkov.reports`."""

from .commands.main import main

main()
