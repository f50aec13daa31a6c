"""What is known of the heads at the last recorded step, in plain English."""

import math

from ...circuits.weights.layer_keys import capitalised, layer_name
from .history import HealthHistory

#: Heads in danger that are listed one by one.
_LISTED = 10


def report(name: str, history: HealthHistory) -> str:
    """Return what was seen last: the extremes, each head that passes the limit soon, and how many alarms there were.

    Args:
        name: The model's class.
        history: What was seen.
    """
    latest, limits = history.latest, history.limits
    if not latest:
        return f"{name}: nothing was recorded yet."
    heads = [states.alarm(key, head, limits) for key, states in latest.items() for head in range(len(states.growth))]
    scored = [head for head in heads if not math.isnan(head.score)]
    entropies = {
        f"{layer_name(*key)} head {head}": entropy
        for key, states in latest.items()
        for head, entropy in enumerate(states.scores.entropy.tolist())
        if not math.isnan(entropy)
    }
    lines = [f"{name} at step {heads[0].step}, {len(heads)} {'head' if len(heads) == 1 else 'heads'}:"]
    if scored:
        largest = max(scored, key=lambda head: head.score)
        lines.append(f"The largest score is {largest.score:.1f}, of {largest.name}.")
    else:
        lines.append("The scores are unknown.")
    if entropies:
        smallest = min(entropies, key=lambda head: entropies[head])
        lines.append(f"The smallest entropy is {entropies[smallest]:.2f} nats, of {smallest}.")
    in_danger = [
        states.alarm(key, head, limits)
        for key, states in latest.items()
        for head in limits.in_danger(states).nonzero()[:, 0].tolist()
    ]
    in_danger.sort(key=lambda head: (head.steps_left, -head.score))
    lines += [f"{capitalised(head.sentence)}." for head in in_danger[:_LISTED]]
    if len(in_danger) > _LISTED:
        lines.append(f"{len(in_danger) - _LISTED} more have passed {limits.limit:g}, or pass it so soon.")
    if scored and not in_danger:
        lines.append(
            f"No score of {limits.least:g} or more passes {limits.limit:g} within {limits.horizon} steps at its "
            f"present growth."
        )
    unknown = sum(math.isnan(head.growth) for head in scored)
    if unknown:
        lines.append(f"The growth of {unknown} {'head' if unknown == 1 else 'heads'} is unknown.")
    count = len(history.alarms)
    lines.append(f"{count or 'No'} {'alarm was' if count == 1 else 'alarms were'} given so far.")
    return "\n".join(lines)
