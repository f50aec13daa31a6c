"""Parameter groups in which the parameters of each circuit learn at a rate of their own."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from typing import Any, Unpack

from torch import Tensor, nn

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from .entries import MULTIPLIER, CircuitEntries, circuit_entries, circuit_multipliers, in_words, is_finite, training


class CircuitParameterGroups(list[dict[str, Any]]):
    """Parameter groups as any optimizer takes them; each has a name, and says how many times the base rate it has."""

    def __init__(self, groups: Iterable[dict[str, Any]], names: Dictionary[int, str], frozen: Sequence[str]) -> None:
        """Take the groups, the names of parameters by their id, and the names of those that do not train."""
        super().__init__(groups)
        self._names, self._frozen = names, frozen

    def describe(self) -> str:
        """Say in words which tensors learn at which rate, a line a group."""
        lines = []
        for group in self:
            parameters = group["params"]
            entries = sum(parameter.numel() for parameter in parameters)
            lines.append(
                f"{group['name']}: rate {group['lr']:g} ({group[MULTIPLIER]:g} times the base), {entries:,} entries in "
                f"{in_words(self._names[id(parameter)] for parameter in parameters)}"
            )
        if self._frozen:
            lines.append(f"left out, for they do not train: {in_words(self._frozen)}")
        return "\n".join(lines)


def circuit_parameter_groups(
    model: nn.Module,
    lr: float,
    qk: float = 30.0,
    ov: float = 1.0,
    *,
    biases: bool = False,
    groups: Iterable[Dictionary[str, Any]] | None = None,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ModelKeywords],
) -> CircuitParameterGroups:
    """Return parameter groups for any optimizer: W_Q and W_K at qk times the base rate, W_V and W_O at ov times.

    Every parameter that trains is in one group: QK, OV, or rest, which has the base rate and holds biases, norms,
    embeddings and all else. The ratio r of the paper is qk / ov. Collapsed W_QK and W_OV count as well.

        optimizer = torch.optim.AdamW(circuit_parameter_groups(model, 3e-4, qk=30.0), weight_decay=0.01)

    Weight decay is multiplied by the rate in AdamW, and part of the gradient in SGD and Adam, so a circuit at 30 times
    the rate also decays 30 times as fast; a group's own weight_decay of 1/30 undoes it. Schedules that multiply the
    rates keep their ratio; to those that set rates (OneCycleLR, the least rate of a cosine) give one for each group.

    Args:
        model: whose attention is found as `open_model` finds it.
        lr: the base rate.
        qk: what multiplies the rate of the QK circuit.
        ov: what multiplies the rate of the OV circuit.
        biases: whether b_Q and b_K learn as QK does, b_V and b_O as OV does.
        groups: parameter groups to take apart, such as one with weight decay and one without: their other options stay,
            and a rate of their own is the base of theirs.
        options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: mapping, family, heads or prefix.

    Raises:
        CallError: a multiplier or the rate cannot be one; a parameter holds both circuits (fused projections, for which
            there is `CircuitRates`); the groups do not hold every trainable parameter once; the attention is frozen.
        QkovError: no attention is found.
    """
    multipliers = circuit_multipliers(qk, ov)
    if not (is_finite(lr) and lr >= 0):
        raise CallError(f"the base rate lr should be a finite number from 0, got {lr!r}")
    found = circuit_entries(model, reading_options(options, reading, ModelKeywords), biases)
    entries = training(found, multipliers)
    _demand_whole(entries)
    circuits = {id(one.parameter): one.circuit for one in entries}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if groups is not None:
        given = [_listed(group) for group in groups]
        _demand_every_parameter(given, model, names)
    apart = []
    for at, group in enumerate(given):
        of_circuit: dict[str, list[nn.Parameter]] = {"QK": [], "OV": [], "rest": []}
        for parameter in group["params"]:
            if parameter.requires_grad:
                of_circuit[circuits.get(id(parameter), "rest")].append(parameter)
        called = group.get("name", str(at)) if len(given) > 1 else group.get("name", "")
        base = group.get("lr", lr)
        for circuit, parameters in of_circuit.items():
            if parameters:
                own = {"params": parameters, "name": f"{called} {circuit}".lstrip()}
                multiplier = multipliers.get(circuit, 1.0)
                apart.append({**group, **own, "lr": multiplier * base, MULTIPLIER: multiplier})
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return CircuitParameterGroups(apart, names, frozen)


def _demand_whole(entries: list[CircuitEntries]) -> None:
    fused = [one for one in entries if not one.is_whole]
    if fused:
        raise CallError(
            f"{fused[0].name} holds W_{'QK' if fused[0].circuit == 'QK' else 'OV'} fused with other weights, and a "
            f"parameter group has one rate: use CircuitRates(optimizer, model, ...), which scales the step of slices"
        )


def _listed(group: Dictionary[str, Any]) -> dict[str, Any]:
    if not isinstance(group, Dictionary) or "params" not in group:
        got = f"one with {', '.join(group) or 'none'}" if isinstance(group, Dictionary) else type(group).__name__
        raise CallError(f"a parameter group should have the key 'params', got {got}")
    given = group["params"]
    listed = list(_unnamed([given] if isinstance(given, Tensor) or not isinstance(given, Iterable) else given))
    for one in listed:
        if not isinstance(one, Tensor):
            raise CallError(f"the params of a group should be parameters, got {type(one).__name__}")
    # What an optimizer and a schedule keep of another list, or of another rate.
    options = {key: value for key, value in group.items() if key not in ("param_names", "initial_lr")}
    return {**options, "params": listed}


def _unnamed(parameters: Iterable[Any]) -> Iterator[Any]:
    """Parameters, of which some may come with their name, as optimizers take them."""
    for parameter in parameters:
        yield parameter[1] if isinstance(parameter, tuple) else parameter


def _demand_every_parameter(groups: list[dict[str, Any]], model: nn.Module, names: dict[int, str]) -> None:
    seen: set[int] = set()
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CallError(
                    f"the groups hold a tensor of shape {tuple(parameter.shape)} that is no parameter of the model"
                )
            if id(parameter) in seen:
                raise CallError(f"the groups hold {names[id(parameter)]} twice")
            seen.add(id(parameter))
    missing = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in seen]
    if missing:
        raise CallError(f"the groups lack parameters that train: {in_words(missing)}")
