"""Parameter groups in which the parameters of each circuit learn at their own rate."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from typing import Any, Unpack

from torch import Tensor, nn

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from .entries import CircuitEntries, CircuitName, circuit_entries, in_words
from .group_ratios import BASE_RATE, MULTIPLIER, departures, watch
from .multipliers import HeadMultipliers, Multipliers, demand_multipliers, is_finite


class CircuitParameterGroups(list[dict[str, Any]]):
    """Parameter groups for any optimizer; each has a name, its multiplier, and the base rate that it was made with."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], base: float, names: Dictionary[int, str], frozen: Sequence[str]
    ) -> None:
        """Store the groups and what is needed to describe them.

        Args:
            groups: The parameter groups.
            base: The base rate.
            names: The names of the parameters by their id.
            frozen: The names of the parameters that are not trained.
        """
        super().__init__(groups)
        self._base, self._names, self._frozen = base, names, frozen

    def describe(self) -> str:
        """Return a text that states which tensors learn at which rate, one line for each group."""
        lines = []
        for group in self:
            parameters = group["params"]
            entries = sum(parameter.numel() for parameter in parameters)
            lines.append(
                f"{group['name']}: rate {group['lr']:g} ({group[MULTIPLIER]:g} times the base), {entries:,} entries in "
                f"{in_words(self._names[id(parameter)] for parameter in parameters)}"
            )
        lines += [f"out of ratio: {departure}" for departure in departures(self)]
        if self._frozen:
            lines.append(f"left out because they are frozen: {in_words(self._frozen)}")
        return "\n".join(lines)

    def rates(self, base: float) -> list[float]:
        """Return a rate for each group, in the ratio of their multipliers, as schedules that set rates take them.

            OneCycleLR(optimizer, max_lr=groups.rates(1e-3), total_steps=1000)

        Args:
            base: The rate of a group with multiplier 1. Groups with a base rate of their own get as many times this
                rate as theirs is of the base rate.

        Raises:
            CallError: The rate is not a finite number of at least 0; or there are groups with a base rate of their own
                beside a base rate of 0.
        """
        if not (is_finite(base) and base >= 0):
            raise CallError(f"the base rate should be a finite number of at least 0, got {base!r}")
        if self._base == 0 and any(group[BASE_RATE] for group in self):
            raise CallError("the groups have rates of their own beside a base rate of 0, so their ratio is not known")
        return [group[MULTIPLIER] * base * (group[BASE_RATE] / self._base if self._base else 1.0) for group in self]


def circuit_parameter_groups(
    model: nn.Module,
    lr: float,
    qk: Multipliers = 30.0,
    ov: Multipliers = 1.0,
    *,
    biases: bool = False,
    groups: Iterable[Dictionary[str, Any]] | None = None,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ModelKeywords],
) -> CircuitParameterGroups:
    """Return parameter groups for any optimizer: W_Q and W_K at qk times the base rate, W_V and W_O at ov times.

    Every parameter that is trained is in exactly one group: QK, OV, or rest, which has the base rate and holds biases,
    norms, embeddings and everything else. A circuit whose layers have different multipliers has a group for each of
    them, such as "QK at 10". The ratio r of the paper is qk / ov. Collapsed W_QK and W_OV belong to the circuits as
    well.

        groups = circuit_parameter_groups(model, 3e-4, qk=30.0)
        optimizer = torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.01)

    Weight decay is multiplied by the rate in AdamW, and is part of the gradient in SGD and Adam, so a circuit at 30
    times the rate also decays 30 times as fast; a weight_decay of 1/30 for its group undoes this.

    Schedules that multiply the rates keep their ratio. Those that set rates, such as OneCycleLR, CyclicLR, or the
    minimum of CosineAnnealingLR or ReduceLROnPlateau, do not: give them `groups.rates(...)`, one rate for each group,
    where they take a list. Before each step of an optimizer its groups are compared, and a group whose rate is not its
    multiple of the base rate is told, once for each optimizer. `CircuitRates` keeps its multipliers under any schedule.

    Args:
        model: The model, whose attention is found as `open_model` finds it.
        lr: The base rate.
        qk: The multiplier of the rate of the QK circuit: a number; a mapping from layers (numbers; with several stacks
            (stack, number), or names such as "encoder layer 3") to numbers, where layers that it does not name have 1;
            or a tensor [layer]. Heads of a layer may differ (see `CircuitRates`) only if their weights are parameters
            of their own.
        ov: The same for the OV circuit.
        biases: Whether b_Q and b_K learn at the rate of QK, and b_V and b_O at that of OV.
        groups: Parameter groups to divide further, such as one with weight decay and one without. They keep their other
            options, and a rate of their own is their base rate.
        options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: mapping, family, heads or prefix.

    Returns:
        A list of parameter groups whose method `describe` states which tensors are in which group.

    Raises:
        CallError: A multiplier or the rate is not a valid number, or names a layer that is not there; a parameter holds
            both circuits (fused projections) or heads with different multipliers, for which there is `CircuitRates`;
            the groups do not hold every trainable parameter once; or the attention is frozen.
        QkovError: No attention is found.
    """
    demand_multipliers(qk, ov)
    if not (is_finite(lr) and lr >= 0):
        raise CallError(f"the base rate lr should be a finite number of at least 0, got {lr!r}")
    every = circuit_entries(model, reading_options(options, reading, ModelKeywords), biases)
    multipliers = HeadMultipliers(every, qk, ov)
    multipliers.demand_one_each(every)
    entries = _trained(every, multipliers)
    circuits = {id(part.parameter): _circuit_and_multiplier(part, multipliers) for part in entries}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    base_groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if groups is not None:
        base_groups = [_listed(group) for group in groups]
        _demand_every_parameter(base_groups, model, names)
    divided = []
    for index, group in enumerate(base_groups):
        group_name = group.get("name", str(index)) if len(base_groups) > 1 else group.get("name", "")
        base = group.get("lr", lr)
        for (circuit, multiplier), parameters in _by_rate(group["params"], circuits).items():
            several = circuit != "rest" and len(multipliers.all_of(circuit)) > 1
            name = f"{group_name} {circuit}{f' at {multiplier:g}' if several else ''}".lstrip()
            own = {"params": parameters, "name": name, "lr": multiplier * base}
            divided.append({**group, **own, MULTIPLIER: multiplier, BASE_RATE: float(base)})
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    watch.begin(divided)
    return CircuitParameterGroups(divided, lr, names, frozen)


def _by_rate(
    parameters: Iterable[nn.Parameter], circuits: Dictionary[int, tuple[CircuitName, float]]
) -> dict[tuple[Any, float], list[nn.Parameter]]:
    """The trained parameters by circuit and multiplier: those of QK, those of OV, and the rest."""
    found: dict[tuple[Any, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            found.setdefault(circuits.get(id(parameter), ("rest", 1.0)), []).append(parameter)
    order = ("QK", "OV", "rest")
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), -item[0][1])))


def _trained(entries: Iterable[CircuitEntries], multipliers: HeadMultipliers) -> list[CircuitEntries]:
    """The entries whose parameters are trained; none is a fault where a circuit has a rate of its own."""
    entries = list(entries)
    trained = [part for part in entries if part.parameter.requires_grad]
    for circuit in ("QK", "OV"):
        others = multipliers.all_of(circuit) - {1}
        if others and not any(part.circuit == circuit for part in trained):
            frozen = in_words(part.name for part in entries if part.circuit == circuit)
            raise CallError(
                f"no parameter of the {circuit} circuit is trained, so {max(others):g} times the rate has no effect: "
                f"its parameters are frozen: {frozen}"
            )
    return trained


def _circuit_and_multiplier(part: CircuitEntries, multipliers: HeadMultipliers) -> tuple[CircuitName, float]:
    if not part.is_whole:
        raise CallError(
            f"{part.name} holds W_{part.circuit} fused with other weights, and a parameter group has one rate: use "
            f"CircuitRates(optimizer, model, ...), which scales the step of slices"
        )
    of_part = sorted({multipliers.of(part.circuit, block) for block in part.blocks})
    if len(of_part) > 1:
        raise CallError(
            f"{part.name} holds heads at {' and '.join(f'{one:g}' for one in of_part)} times the base rate, and a "
            f"parameter group has one: use CircuitRates(optimizer, model, ...), which scales the step of each head"
        )
    return part.circuit, of_part[0]


def _listed(group: Dictionary[str, Any]) -> dict[str, Any]:
    if not isinstance(group, Dictionary) or "params" not in group:
        got = f"one with {', '.join(group) or 'none'}" if isinstance(group, Dictionary) else type(group).__name__
        raise CallError(f"a parameter group should have the key 'params', got {got}")
    params = group["params"]
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        params = [params]
    parameters = list(_unnamed(params))
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise CallError(f"the params of a group should be parameters, got {type(parameter).__name__}")
    # These keys are what an optimizer and a schedule remember of another list, or of another rate.
    options = {key: value for key, value in group.items() if key not in ("param_names", "initial_lr")}
    return {**options, "params": parameters}


def _unnamed(parameters: Iterable[Any]) -> Iterator[Any]:
    """Yield parameters, of which some may come with their name, as optimizers accept them."""
    for parameter in parameters:
        yield parameter[1] if isinstance(parameter, tuple) else parameter


def _demand_every_parameter(groups: list[dict[str, Any]], model: nn.Module, names: dict[int, str]) -> None:
    seen: set[int] = set()
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CallError(
                    f"the groups hold a tensor of shape {tuple(parameter.shape)} that is not a parameter of the model"
                )
            if id(parameter) in seen:
                raise CallError(f"the groups hold {names[id(parameter)]} twice")
            seen.add(id(parameter))
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in seen
    ]
    if missing:
        raise CallError(f"the groups lack parameters that are trained: {in_words(missing)}")
