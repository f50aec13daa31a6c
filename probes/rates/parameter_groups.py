"""Parameter groups in which the parameters of each circuit learn at their own rate."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from typing import Any, Unpack

from torch import Tensor, nn

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from .entries import MULTIPLIER, CircuitEntries, circuit_entries, circuit_multipliers, in_words, is_finite, trainable


class CircuitParameterGroups(list[dict[str, Any]]):
    """Parameter groups for any optimizer; each group has a name and its multiple of the base rate."""

    def __init__(self, groups: Iterable[dict[str, Any]], names: Dictionary[int, str], frozen: Sequence[str]) -> None:
        """Store the groups and what is needed to describe them.

        Args:
            groups: The parameter groups.
            names: The names of the parameters by their id.
            frozen: The names of the parameters that are not trained.
        """
        super().__init__(groups)
        self._names, self._frozen = names, frozen

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
        if self._frozen:
            lines.append(f"left out because they are frozen: {in_words(self._frozen)}")
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

    Every parameter that is trained is in exactly one group: QK, OV, or rest, which has the base rate and holds biases,
    norms, embeddings and everything else. The ratio r of the paper is qk / ov. Collapsed W_QK and W_OV belong to the
    circuits as well.

        optimizer = torch.optim.AdamW(circuit_parameter_groups(model, 3e-4, qk=30.0), weight_decay=0.01)

    Weight decay is multiplied by the rate in AdamW, and is part of the gradient in SGD and Adam, so a circuit at 30
    times the rate also decays 30 times as fast; a weight_decay of 1/30 for its group undoes this. Schedules that
    multiply the rates keep their ratio; for schedules that set rates (OneCycleLR, the minimum rate of a cosine), give
    one rate for each group.

    Args:
        model: The model, whose attention is found as `open_model` finds it.
        lr: The base rate.
        qk: The multiplier of the rate of the QK circuit.
        ov: The multiplier of the rate of the OV circuit.
        biases: Whether b_Q and b_K learn at the rate of QK, and b_V and b_O at that of OV.
        groups: Parameter groups to divide further, such as one with weight decay and one without. They keep their other
            options, and a rate of their own is their base rate.
        options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: mapping, family, heads or prefix.

    Returns:
        A list of parameter groups whose method `describe` states which tensors are in which group.

    Raises:
        CallError: A multiplier or the rate is not a valid number; a parameter holds both circuits (fused projections,
            for which there is `CircuitRates`); the groups do not hold every trainable parameter once; or the attention
            is frozen.
        QkovError: No attention is found.
    """
    multipliers = circuit_multipliers(qk, ov)
    if not (is_finite(lr) and lr >= 0):
        raise CallError(f"the base rate lr should be a finite number of at least 0, got {lr!r}")
    entries = circuit_entries(model, reading_options(options, reading, ModelKeywords), biases)
    entries = trainable(entries, multipliers)
    _demand_whole(entries)
    circuits = {id(part.parameter): part.circuit for part in entries}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    base_groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if groups is not None:
        base_groups = [_listed(group) for group in groups]
        _demand_every_parameter(base_groups, model, names)
    divided = []
    for index, group in enumerate(base_groups):
        by_circuit: dict[str, list[nn.Parameter]] = {"QK": [], "OV": [], "rest": []}
        for parameter in group["params"]:
            if parameter.requires_grad:
                by_circuit[circuits.get(id(parameter), "rest")].append(parameter)
        group_name = group.get("name", str(index)) if len(base_groups) > 1 else group.get("name", "")
        base = group.get("lr", lr)
        for circuit, parameters in by_circuit.items():
            if parameters:
                own = {"params": parameters, "name": f"{group_name} {circuit}".lstrip()}
                multiplier = multipliers.get(circuit, 1.0)
                divided.append({**group, **own, "lr": multiplier * base, MULTIPLIER: multiplier})
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return CircuitParameterGroups(divided, names, frozen)


def _demand_whole(entries: list[CircuitEntries]) -> None:
    fused = [part for part in entries if not part.is_whole]
    if fused:
        raise CallError(
            f"{fused[0].name} holds W_{'QK' if fused[0].circuit == 'QK' else 'OV'} fused with other weights, and a "
            f"parameter group has one rate: use CircuitRates(optimizer, model, ...), which scales the step of slices"
        )


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
