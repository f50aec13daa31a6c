"""Fused kernels of attention, which form no maps: what they were called with, and their scores, block by block."""
