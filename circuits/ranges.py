"""Which byte ranges to ask for together."""

from collections.abc import Sequence
from itertools import pairwise

#: The bytes that may be asked for beyond those wanted, as a part of those wanted.
SLACK = 0.05
#: Requests do not grow beyond this by being merged, so that several can run side by side.
LARGEST = 16 * 2**20


def merged(
    ranges: Sequence[tuple[int, int]], slack: float = SLACK, largest: int = LARGEST
) -> list[tuple[tuple[int, int], list[int]]]:
    """Return requests that cover the ranges, each with the positions of the ranges that it brings.

    For ranges of no bytes nothing is asked. Neighbours become one request. Gaps are bridged from the smallest on, as
    long as all that is bridged stays within the slack.

    Args:
        ranges: [start, stop) in bytes.
        slack: the bytes that may be bridged, as a part of those wanted.
        largest: of a request that is merged, in bytes.
    """
    order = sorted((position for position, (start, stop) in enumerate(ranges) if stop > start), key=ranges.__getitem__)
    allowed = slack * sum(stop - start for start, stop in ranges)
    gaps = sorted((max(0, ranges[b][0] - ranges[a][1]), b) for a, b in pairwise(order))
    bridged = set()
    for gap, position in gaps:
        if gap <= allowed:
            allowed -= gap
            bridged.add(position)
    requests: list[tuple[tuple[int, int], list[int]]] = []
    for position in order:
        start, stop = ranges[position]
        if requests and position in bridged and max(stop, requests[-1][0][1]) - requests[-1][0][0] <= largest:
            (first, last), members = requests[-1]
            requests[-1] = (first, max(last, stop)), [*members, position]
        else:
            requests.append(((start, stop), [position]))
    return requests
