"""Batches of sequences of like length, so that little is padding."""

from collections.abc import Sequence

from ...circuits.errors import CallError


def length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return batches of indices, from long to short, each of at most `batch_tokens` tokens with its padding.

    A sequence longer than that is a batch of its own.

    Raises:
        CallError: batch_tokens is below 1.
    """
    if batch_tokens < 1:
        raise CallError(f"batch_tokens should be at least 1, got {batch_tokens}")
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if buckets and (len(buckets[-1]) + 1) * longest <= batch_tokens:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = lengths[index]
    return buckets
