"""How findings are worded."""

from collections.abc import Iterable

from ....circuits.weights.layer_keys import LayerKey, capitalised, enumerated, layers_in_words

#: How many steps a sentence names.
_NAMED = 12


def steps_in_words(steps: Iterable[int], unit: str = "step") -> str:
    """Return steps in words: "step 5", "steps 0, 10 and 30"; of many only the first are named."""
    numbers = [str(step) for step in steps]
    more = len(numbers) - _NAMED
    shown = [*numbers[:_NAMED], f"{more} more"] if more > 1 else numbers
    return f"{unit}{'s' * (len(numbers) > 1)} {enumerated(shown)}"


def of_identical_checkpoints(steps: tuple[int, ...], count: int, unit: str) -> str:
    """Return the sentence about checkpoints that are identical in all layers.

    Args:
        steps: The steps of the identical checkpoints.
        count: How many checkpoints the run has.
        unit: What a step counts.
    """
    if len(steps) < count:
        return f"{capitalised(steps_in_words(steps, unit))} hold identical attention weights, to the bit."
    everything = "Both checkpoints" if count == 2 else f"All {count} checkpoints"
    return (
        f"{everything}, {steps_in_words(steps, unit)}, hold identical attention weights, to the bit: one was copied, "
        "or attention was not trained."
    )


def of_identical_layers(steps: tuple[int, ...], layers: list[LayerKey], steps_of_run: list[int], unit: str) -> str:
    """Return the sentence about layers that are identical in several checkpoints, though not in all.

    Args:
        steps: The steps at which the layers are identical.
        layers: The layers.
        steps_of_run: All steps of the run, in order.
        unit: What a step counts.
    """
    named, several = layers_in_words(layers), len(layers) > 1
    first, last = steps_of_run.index(steps[0]), steps_of_run.index(steps[-1])
    between = [step for step in steps_of_run[first:last] if step not in steps]
    same = f"{capitalised(named)} {'are' if several else 'is'} identical, to the bit, at {steps_in_words(steps, unit)}"
    if between:
        return f"{same}, but not at {steps_in_words(between, unit)} in between."
    outside = [*steps_of_run[:first][-1:], *steps_of_run[last + 1 :][:1]]
    return (
        f"{same}, while other layers change, but not at {steps_in_words(outside, unit)}: "
        f"{'they were' if several else 'it was'} frozen for a time, or these checkpoints hold weights of each other."
    )


def of_distant_checkpoints(
    steps: tuple[int, ...], neighbours: tuple[int, int], layers: list[LayerKey], distances: tuple[float, ...], unit: str
) -> str:
    """Return the sentence about checkpoints that are farther from their neighbours than these are from each other.

    Args:
        steps: The steps of the distant checkpoints.
        neighbours: The steps before and after.
        layers: The layers in which they are distant.
        distances: The distance from the step before, to the step after, and between these two.
        unit: What a step counts.
    """
    before, after = neighbours
    to, back, across = (f"{distance:.2g}" for distance in distances)
    most = (
        f" in {layers_in_words(layers)}"
        if len(layers) == 1
        else f" in {len(layers)} layers ({layers_in_words(layers)})"
    )
    if len(steps) == 1:
        return (
            f"{capitalised(unit)} {steps[0]} is farther from its neighbours, {unit}s {before} and {after}, than they "
            f"are from each other{most}: about {to} and {back}, against {across}, relative to the norm of the weights."
        )
    return (
        f"{capitalised(steps_in_words(steps, unit))} lie apart{most}: the run jumps by about {to} after {unit} "
        f"{before} and by {back} before {unit} {after}, which are only about {across} from each other, relative to the "
        "norm of the weights."
    )


def of_damaged_layer(key: LayerKey, steps: list[int], unit: str) -> str:
    """Return the sentence about a layer whose weights are not finite at some steps.

    Args:
        key: The layer.
        steps: The steps.
        unit: What a step counts.
    """
    return (
        f"{capitalised(steps_in_words(steps, unit))} {'have' if len(steps) > 1 else 'has'} NaN or infinite weights in "
        f"{layers_in_words([key])}, which have no distance from others."
    )
