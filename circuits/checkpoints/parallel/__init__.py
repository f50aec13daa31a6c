"""Checkpoints of training on several devices: torch's distributed ones and DeepSpeed's."""
