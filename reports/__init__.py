"""Reports: tables become figures and HTML pages; and the command line."""
