"""The axes of each attention weight under the layouts that have a name. Nothing here needs torch."""

#: The axes to which each weight is rearranged. QKV is one tensor that holds the three weights along an axis qkv.
TARGETS = {
    "Q": "head d_model d_head",
    "K": "head d_model d_head",
    "V": "head d_model d_head",
    "O": "head d_head d_model",
    "QKV": "qkv head d_model d_head",
    "QK": "head key query",
    "OV": "head write read",
}

SCORES_IN = ("Q", "K", "V")
_COLLAPSED = {role: TARGETS[role] for role in ("QK", "OV")}
_LINEAR = {**dict.fromkeys(SCORES_IN, "(head d_head) d_model"), "O": "d_model (head d_head)"}
_CONV1D = {**dict.fromkeys(SCORES_IN, "d_model (head d_head)"), "O": "(head d_head) d_model"}

#: Layouts that have a name. If qkv precedes head, the three weights follow one another. If it follows head, each group
#: of heads has its queries, then its key and its value.
LAYOUTS: dict[str, dict[str, str]] = {
    "linear": {**_LINEAR, "QKV": "(qkv head d_head) d_model", **_COLLAPSED},
    "conv1d": {**_CONV1D, "QKV": "d_model (qkv head d_head)", **_COLLAPSED},
    "transformer_lens": {role: axes for role, axes in TARGETS.items() if role != "QKV"},
}
