"""`python -m qkov.reports` is the command `qkov`."""

from .command_line import main

main()
