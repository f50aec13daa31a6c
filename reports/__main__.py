"""`python -m qkov.reports` is the command `qkov`."""

from .commands.main import main

main()
