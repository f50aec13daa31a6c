"""The conventions of an explanation, in sentences."""

from typing import Any

from .page import number, percent

_REMOVALS = {
    "deletion": "deleted, those behind them moving up in their order",
    "mask token": "replaced by the model's mask token",
    "attention mask": "hidden by the attention mask, in their places",
}
_PROBABILITIES = {
    "classes": "those of the classes",
    "continuations": "those among each example's continuations alone",
    "vocabulary": "those in the whole vocabulary",
}


def conventions(described: dict[str, Any]) -> list[str]:
    """Return what a reader has to know to compare the figures with others.

    Args:
        described: an explanation's description.
    """
    settings, removed = described["settings"], described["settings"]["perturbation"]
    rolled = settings["rollout"]
    heads = {"mean": "averaged", "max": "fused by the largest", "min": "fused by the smallest"}[rolled["heads"]]
    cuts = ", ".join(f"{100 * cut:g}" for cut in removed["cuts"])
    explained = "what the model predicts" if settings["target"] == "predicted" else "the label"
    kept = (
        "The token at which the prediction is read is never removed, nor are"
        if removed["keep_readout"]
        else "Never removed are"
    )
    said = [
        f"Probabilities are {_PROBABILITIES[described['probability']]}; gradients, ablation and integrated gradients "
        f"explain the log-probability in all that the model can say.",
        f"Rollout: heads {heads}, rows brought to sum 1, {percent(rolled['residual'])} of the identity for the "
        f"residual stream in each layer, read where the prediction is read (Abnar & Zuidema 2020).",
        "Special tokens count as attended to. Padding takes no part.",
        f"Comprehensiveness p(y|x) − p(y|x without r) and sufficiency p(y|x) − p(y|r alone), y being {explained} "
        f"(DeYoung et al. 2020). r are the first tokens of the ranking, {cuts} % of those that can be removed, rounded "
        f"up, at least one; the figure is the mean over the cuts. Tokens are {_REMOVALS[removed['removal']]}. "
        f"{kept} special tokens.",
        "AUPRC is the average precision of the ranking against the rationale, the mean over annotators. Mass on "
        "relevant tokens is the attention there; of signed attributions, the share of what speaks for the prediction.",
        f"Intervals are 95 % bootstrap intervals over examples ({settings['resamples']} resamples, seed "
        f"{settings['seed']}); of shares that are 0 or 1 throughout, exact binomial ones. Random rankings: "
        f"{settings['draws']} draws for each example, seed {settings['seed']}.",
    ]
    delta = described["integrated_gradients_delta"]
    if delta is not None:
        said.append(
            f"Integrated gradients: {settings['steps']} steps from the zero embedding; sums of attributions miss the "
            f"change of the log-probability by at most {number(delta, 2)}."
        )
    if settings["convention"] == "paper":
        readout = settings["paper_readout"]
        said.append(
            f"The paper's convention: rollout is read of sequences padded to {readout['padded_length']} tokens, "
            f"padding {'masked' if readout['pad_mask'] else 'not masked'}, at the place where the released code reads; "
            f"examples without relevant tokens count as attention 0; the cut is a share of the padded length, and the "
            f"tokens that sufficiency keeps are in the order of a partial sort."
        )
    else:
        said.append("Convention: standard, not that of the paper's released code.")
    return said
