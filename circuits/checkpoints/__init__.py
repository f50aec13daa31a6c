"""The named tensors of checkpoint files, and runs of checkpoints over training steps."""
