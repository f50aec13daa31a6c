"""What a mapping, or a family with a config, states about the attention of a stack beyond its tensors."""

from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ..errors import CallError
from ..weights.attention_weights import AttentionFacts
from ..weights.norms import HeadNorm, Norm
from ..weights.rope_scaling import scaled_rotary
from ..weights.rotary import Rotary
from .schema import CHOICES, FACTS


class Unknown(StrEnum):
    """Stands for a fact that nothing states, as distinct from something that does not exist."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN


@dataclass(frozen=True)
class StatedFacts:
    """A table of facts, and the layers in which some facts differ.

    Attributes:
        table: Each fact by its name.
        cases: Numbers of layers, with the facts that hold for them instead.
        origin: Where the facts come from, for messages.
    """

    table: dict[str, Any] = field(default_factory=dict)
    cases: tuple[tuple[frozenset[int], dict[str, Any]], ...] = ()
    origin: str = "the mapping"

    def __post_init__(self) -> None:
        """Refuse unknown facts, and values of the wrong type.

        Raises:
            CallError: The message names the fact.
        """
        for table in (self.table, *(case for _, case in self.cases)):
            for name, value in table.items():
                self._check(name, value)
        for name in ("norm", "query_key_norm"):
            if isinstance(self.table.get(name), dict) and "kind" not in self.table[name]:
                raise CallError(f"[{name}] of {self.origin} lacks kind: one of {', '.join(CHOICES['kind'])}")

    @property
    def unknown(self) -> frozenset[str]:
        """The names of the facts that nothing states."""
        tables = (self.table, *(case for _, case in self.cases))
        return frozenset(
            name for table in tables for name, value in table.items() if value is UNKNOWN or _kind(value) is UNKNOWN
        )

    def of_layer(self, layer: int, d_head: int | None) -> AttentionFacts:
        """Return the facts of one layer.

        Args:
            layer: Number of the layer.
            d_head: Inner width of its heads; None if the layer has no factors.
        """
        table = self._of(layer)
        score_scale = table.get("score_scale")
        if table.get("divide_scores_by_layer") is True:
            score_scale = (score_scale or (d_head or 1) ** -0.5) / (layer + 1)
        rotary = self._rotary(table.get("rotary"), d_head)
        return AttentionFacts(
            rotary=rotary,
            score_scale=_number(score_scale),
            soft_cap=_number(table.get("soft_cap")),
            clip_qkv=_number(table.get("clip_qkv")),
            sinks=bool(table.get("sinks", False)),
            window=table.get("window"),
            causal=table.get("causal"),
            positions=table.get("positions") or (None if rotary is None else "rotary"),
            cross=bool(table.get("cross", False)),
            used_by=table.get("used_by") or 1,
            unknown=self.unknown,
        )

    def norm(self, layer: int, tensors: Dictionary[str, Tensor]) -> Norm | None:
        """Return the norm in front of a layer's attention; None if there is none, or it is unknown.

        Args:
            layer: Number of the layer.
            tensors: Tensors of the layer by role, among them `norm_gain` and `norm_bias` if they exist.
        """
        table = self._of(layer).get("norm")
        if not table or "norm" in self.unknown:
            return None
        return Norm(
            kind=table["kind"],
            gain=_with_offset(tensors.get("norm_gain"), table),
            bias=tensors.get("norm_bias"),
            eps=_number(table.get("eps")),
        )

    def head_norm(self, layer: int, side: str, tensors: Dictionary[str, Tensor], d_head: int | None) -> HeadNorm | None:
        """Return the norm of queries or keys; None if there is none.

        Args:
            layer: Number of the layer.
            side: "query" or "key".
            tensors: Tensors of the layer by role.
            d_head: Inner width of the layer's heads; None if the layer has no factors.

        Raises:
            CallError: The width of the gain or the bias is not a multiple of d_head.
        """
        table = self._of(layer).get("query_key_norm")
        gain, bias = tensors.get(f"{side}_norm_gain"), tensors.get(f"{side}_norm_bias")
        if table is None and (gain is not None or "query_key_norm" in self.unknown):
            table = {"kind": None}
        if table is None:
            return None
        # One long gain belongs to a norm over all heads. Heads with gains of their own have one row each.
        over = "all" if gain is not None and gain.ndim == 1 and gain.numel() != d_head else "head"
        return HeadNorm(
            kind=None if table["kind"] is UNKNOWN else table["kind"],
            gain=_by_head(_with_offset(gain, table), d_head),
            bias=_by_head(bias, d_head),
            eps=_number(table.get("eps")),
            over=table.get("over") or over,
        )

    def _of(self, layer: int) -> dict[str, Any]:
        table = dict(self.table)
        for layers, case in self.cases:
            if layer in layers:
                for name, value in case.items():
                    merged = isinstance(value, dict) and isinstance(table.get(name), dict)
                    table[name] = {**table[name], **value} if merged else value
        return {name: None if value is UNKNOWN else value for name, value in table.items()}

    def _rotary(self, stated: Any, d_head: int | None) -> Rotary | None:
        if not stated:
            return None
        entries = stated if isinstance(stated, dict) else {}
        table = {name: value for name, value in entries.items() if value is not None}
        pairing, base = table.get("pairing", "halves"), table.get("base", UNKNOWN)
        if d_head is None or base is UNKNOWN or UNKNOWN in (table.get("dims"), table.get("fraction")):
            return Rotary(pairing=pairing)
        width = table.get("dims", int(d_head * table.get("fraction", 1.0)))
        lengths = table.get("max_positions"), table.get("trained_positions")
        return scaled_rotary(d_head, width, float(base), pairing, table.get("scaling"), *lengths)

    def _check(self, name: str, value: Any) -> None:
        if name not in FACTS:
            raise CallError(f"{self.origin} states the unknown fact {name!r}; known are {', '.join(FACTS)}")
        expected = FACTS[name]
        if value is UNKNOWN or value is None or (isinstance(expected, dict) and value is False):
            return
        if name == "rotary" and value is True:
            return
        if not isinstance(expected, dict):
            self._check_value(name, value, expected)
            return
        if not isinstance(value, dict):
            raise CallError(f"{name} of {self.origin} should be a table with {', '.join(expected)}, got {value!r}")
        for key, entry in value.items():
            if key not in expected:
                raise CallError(
                    f"[{name}] of {self.origin} has the unknown key {key!r}; known are {', '.join(expected)}"
                )
            if entry is not UNKNOWN and entry is not None:
                self._check_value(f"{name}.{key}", entry, expected[key])

    def _check_value(self, name: str, value: Any, expected: tuple[type, ...]) -> None:
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            kinds = " or ".join(kind.__name__ for kind in expected)
            raise CallError(f"{name} of {self.origin} should be of type {kinds}, got {value!r}")
        choices = CHOICES.get(name.rpartition(".")[2])
        if choices and value not in choices:
            raise CallError(f"{name} of {self.origin} should be one of {', '.join(choices)}, got {value!r}")


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else None


def _number(value: Any) -> float | None:
    return None if value is None or value is UNKNOWN else float(value)


def _with_offset(gain: Tensor | None, table: Dictionary[str, Any]) -> Tensor | None:
    """Return 1 + w if the model stores w; in float64, because the type of w may not hold 1 + w exactly."""
    offset = table.get("gain_offset")
    return gain if gain is None or not offset else gain.to(torch.float64) + offset


def _by_head(gain: Tensor | None, d_head: int | None) -> Tensor | None:
    """Return the gain as [d_head] if all heads share it, else as [head, d_head]."""
    if gain is None or not d_head or gain.numel() == d_head:
        return gain
    if gain.numel() % d_head:
        raise CallError(
            f"the norm of queries or keys has {gain.numel()} entries, which is not a multiple of d_head = {d_head}"
        )
    return gain.reshape(-1, d_head)
