"""Tables to figures, HTML and the command line."""
