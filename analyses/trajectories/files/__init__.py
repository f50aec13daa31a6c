"""The files of a run store: those of the steps, and the numbers of training."""
