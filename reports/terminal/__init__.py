"""What the commands show on a terminal: lines of text, progress, and results for programs."""
