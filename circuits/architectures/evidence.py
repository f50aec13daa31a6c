"""What a file and its config say against the facts of a family: such facts are unknown.

A model that has a known family's tensor names is that family only as far as its tensors and its config agree.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .config_lookups import Config
from .named_layouts import TARGETS
from .stated_facts import UNKNOWN
from .tensor_names import named

#: Tensors of learned positions, beside the layers or among the embeddings.
_LEARNED_POSITIONS = (
    *("wpe.weight", "pos_emb", "pos_embed", "pos_emb.weight", "pos_embed.weight", "position_embedding.weight"),
    *("position_embeddings.weight", "embed_positions.weight", "positional_embedding", "pos_embed.W_pos"),
    *("position_embedding_table.weight",),
)
#: Tensors in an attention module, by the facts that they show to be other than the family says, unless the family
#: states the fact.
_IN_ATTENTION = {
    r"(^|[._])(qk?|k|query|key)_?(layer)?_?(norms?|ln)\b|(norms?|ln)_[qk]\b|qk_?norm": ("query_key_norm",),
    r"(^|[._])(attn_|attention_)?sinks?\b": ("sinks",),
    r"rotary|rope\b|inv_freq|freqs": ("rotary", "positions"),
    r"alibi|slopes": ("positions",),
    r"(^|[._])rel(ative)?_|distance_embedding": ("positions",),
    r"logit_scale|temperature|(^|[._])tau\b": ("score_scale",),
}
#: Keys of a script's config, by the facts that they show to be other than the family says.
_IN_CONFIG = {
    r"(qk?|k|query|key)_?(layer)?_?(norm|ln)|norm_qk": ("query_key_norm",),
    r"norm|(^|_)ln(_|$)": ("norm",),
    r"rope|rotary|alibi|(^|_)pos(_|$)|position|theta|yarn|(^|_)nope": ("rotary", "positions"),
    r"window|sliding|(^|_)local": ("window",),
    r"soft_?cap": ("soft_cap",),
    r"(^|_)mup|(attn|attention|qk|softmax|logits?|scores?)_?\w*(scale|scalar|temperature|multiplier)": ("score_scale",),
    r"sinks?(_|$)": ("sinks",),
    r"causal|bidirectional": ("causal",),
    r"clip_?qkv": ("clip_qkv",),
}
#: Keys about training, which say nothing about attention.
_OF_TRAINING = re.compile(
    r"grad|(^|_)log(_|s?$|ging)|init|lr|learning|optim|decay|dropout|wandb|loss|max_pos|num_pos|n_pos"
)
_OFF = (None, False, 0, "", "none", "None", "off", "false")
_POSITION_TYPES = {
    r"relative": "relative",
    r"rotary|rope": "rotary",
    r"alibi": "alibi",
    r"absolute|learned|sinusoidal": "absolute",
}


@dataclass
class Contradictions:
    """The facts of a family that a file does not bear out.

    Attributes:
        unknown: The names of the facts that are unknown.
        reasons: Why, by what the file has or lacks.
    """

    unknown: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, facts: Iterable[str], what: str, reason: str) -> None:
        """Add facts that are unknown.

        Args:
            facts: Names of the facts.
            what: What the file has or lacks.
            reason: What follows from it.
        """
        self.unknown |= set(facts)
        self.reasons[what] = reason


def contradictions(
    table: dict[str, Any], prefix: str, names: set[str], config: Config | None, own_keys: tuple[str, ...], whole: bool
) -> Contradictions:
    """Return what contradicts the facts of a stack.

    Args:
        table: The table of the stack, without look-ups.
        prefix: Prefix of the tensor names.
        names: Names of the tensors in the file.
        config: The config that the table was filled with; None if there is none.
        own_keys: Keys that the family's own code writes into its config; empty if a library wrote the config.
        whole: Whether the file holds the whole model, so that what is absent does not exist.
    """
    against = Contradictions()
    if whole:
        _missing_evidence(table, names, against)
    _norm_with_bias(table, prefix, names, against)
    _positions(table, prefix, names, against)
    _other_tensors(table, prefix, names, against)
    if config is not None:
        _position_type(table, config, against)
        if own_keys:
            _other_keys(table, config, own_keys, against)
    return against


def with_biases(table: dict[str, Any], prefix: str, names: set[str]) -> dict[str, Any]:
    """Return the table with those biases of its weights that the file has, and the family does not name.

    Args:
        table: The table of a stack.
        prefix: Prefix of the tensor names.
        names: Names of the tensors in the file.
    """
    tensors = table["tensors"]
    biases = {
        f"b_{role}": f"{name.removesuffix('weight')}bias"
        for role, name in tensors.items()
        if role in TARGETS and role not in ("QK", "OV") and name.endswith(".weight") and f"b_{role}" not in tensors
    }
    there = {role: name for role, name in biases.items() if _under(prefix, name, names)}
    return {**table, "tensors": {**tensors, **there}}


def _missing_evidence(table: dict[str, Any], names: set[str], against: Contradictions) -> None:
    for fact, templates in table.get("evidence", {}).items():
        is_stated = table.get(fact) not in (None, False, UNKNOWN)
        if is_stated and templates and not any(named(template, names) for template in templates):
            facts = ("positions", "rotary") if fact == "positions" else (fact,)
            against.add(facts, templates[0], f"not in the file, so {_words(facts)}")


def _norm_with_bias(table: dict[str, Any], prefix: str, names: set[str], against: Contradictions) -> None:
    norm, gain = table.get("norm"), table["tensors"].get("norm_gain", "")
    bias = re.sub(r"(weight|scale|w)$", lambda end: "b" if end[0] == "w" else "bias", gain)
    is_rms = isinstance(norm, dict) and norm.get("kind") == "rms_norm"
    if is_rms and bias != gain and _under(prefix, bias, names):
        against.add(("norm",), bias, "an RMSNorm has no bias, so norm is unknown")


def _positions(table: dict[str, Any], prefix: str, names: set[str], against: Contradictions) -> None:
    # Models with relative positions often have absolute ones too.
    if not table.get("rotary") and table.get("positions") not in ("alibi", "none"):
        return
    if table.get("cross"):
        return
    first = next(name for role, name in table["tensors"].items() if role in TARGETS)
    beside = first.partition("{layer}")[0].rpartition(".")[0].rpartition(".")[0]
    for base in {_join(prefix, beside), prefix}:
        for tensor in _LEARNED_POSITIONS:
            for name in (_join(base, tensor), _join(base, f"embeddings.{tensor}")):
                if name in names:
                    reason = "learned positions, which this family does not have, so its positions are unknown"
                    against.add(("positions", "rotary"), name, reason)


def _other_tensors(table: dict[str, Any], prefix: str, names: set[str], against: Contradictions) -> None:
    """Look for tensors in the attention modules that the family does not name."""
    own = {role: name for role, name in table["tensors"].items() if name}
    first = next((own[role] for role in ("Q", "QKV") if role in own), None)
    if first is None:
        return
    parts = first.split(".")
    module = ".".join(parts[: -2 if parts[-1] == "weight" else -1])
    if not module:
        return
    pattern = re.compile(re.escape(f"{prefix}." if prefix else "") + _pattern(module) + r"\.(?P<rest>.+)")
    known = [re.compile(_pattern(name)) for name in own.values()]
    rests: dict[str, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        plain = name.removeprefix(f"{prefix}.") if prefix else name
        if match and not any(each.fullmatch(plain) for each in known):
            rests.setdefault(match["rest"], name)
    for rest, name in sorted(rests.items()):
        facts = next((facts for shown, facts in _IN_ATTENTION.items() if re.search(shown, rest)), None)
        # Cross-attention has no positions, even where its module has tensors for them.
        if facts is None or _is_stated(table, facts, rest) or (table.get("cross") and "positions" in facts):
            continue
        reason = f"this family's attention has no such tensor, so {_words(facts)}"
        against.add(facts, name, reason)


def _is_stated(table: dict[str, Any], facts: tuple[str, ...], rest: str) -> bool:
    """Return whether the family itself has what the tensor shows."""
    if "rotary" in facts:
        return bool(table.get("rotary"))
    if facts == ("positions",):
        return table.get("positions") == ("alibi" if re.search("alibi|slopes", rest) else "relative")
    return table.get(facts[0]) not in (None, False)


def _position_type(table: dict[str, Any], config: Config, against: Contradictions) -> None:
    stated = config.get("position_embedding_type")
    if not isinstance(stated, str) or table.get("cross") or table.get("positions") is UNKNOWN:
        return
    kind = next((kind for shown, kind in _POSITION_TYPES.items() if re.search(shown, stated.lower())), None)
    read = "rotary" if table.get("rotary") else table.get("positions")
    if kind is not None and read is not None and kind != read:
        what = f"position_embedding_type = {stated!r} in the config"
        against.add(("positions", "rotary"), what, "this family has other positions, so they are unknown")


def _other_keys(table: dict[str, Any], config: Config, own_keys: tuple[str, ...], against: Contradictions) -> None:
    for key, value in config.items():
        is_off = (isinstance(value, (list, dict)) and not value) or any(value is off or value == off for off in _OFF)
        if key in own_keys or is_off or _OF_TRAINING.search(key.lower()):
            continue
        facts = next((facts for shown, facts in _IN_CONFIG.items() if re.search(shown, key.lower())), None)
        if facts is None or _agrees(table, facts, value):
            continue
        reason = f"this family's own code has no such setting, so {_words(facts)}"
        against.add(facts, f"{key} = {value!r} in the config", reason)


def _agrees(table: dict[str, Any], facts: tuple[str, ...], value: object) -> bool:
    """Return whether a setting says in words what the family states."""
    if not isinstance(value, str):
        return False
    norm = table.get("norm")
    if "norm" in facts and isinstance(norm, dict):
        return value.lower().replace("_", "") == str(norm.get("kind")).replace("_", "")
    return "positions" in facts and table.get("positions") == "absolute" and value.lower() in ("absolute", "learned")


def _under(prefix: str, template: str, names: set[str]) -> bool:
    pattern = re.compile(_pattern(_join(prefix, template)))
    return any(pattern.fullmatch(name) for name in names)


def _pattern(template: str) -> str:
    return re.sub(r"\\\{(layer|inner|head)\\\}", r"\\d+", re.escape(template))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _words(facts: Iterable[str]) -> str:
    names = [fact.replace("_", " ") for fact in facts]
    return f"{' and '.join(names)} {'are' if len(names) > 1 or names[0].endswith('s') else 'is'} unknown"
