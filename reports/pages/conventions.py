"""The conventions of an explanation in sentences."""

from typing import Any

from .page import number, percent

_REMOVALS = {
    "deletion": "deleted, and the tokens after them move up",
    "mask token": "replaced by the model's mask token",
    "attention mask": "hidden by the attention mask, while positions stay",
}
_PROBABILITIES = {
    "classes": "those of the classes",
    "continuations": "those among each example's continuations only",
    "vocabulary": "those in the whole vocabulary",
}


def conventions(described: dict[str, Any]) -> list[str]:
    """Return the sentences that a reader needs in order to compare the results with others.

    Args:
        described: The description of an explanation.
    """
    settings, removed = described["settings"], described["settings"]["perturbation"]
    rolled = settings["rollout"]
    heads = {"mean": "averaged", "max": "fused by their maximum", "min": "fused by their minimum"}[rolled["heads"]]
    cuts = ", ".join(f"{100 * cut:g}" for cut in removed["cuts"])
    explained = "what the model predicts" if settings["target"] == "predicted" else "the label"
    readout = (
        "Neither the token at the readout position nor special tokens are removed."
        if removed["keep_readout"]
        else "Special tokens are never removed."
    )
    said = [
        f"Probabilities are {_PROBABILITIES[described['probability']]}; gradients, ablation and integrated gradients "
        f"explain the log-probability among all of the model's outputs.",
        f"Rollout: heads are {heads}, rows are scaled to sum to 1, {_identity(rolled['residual'])} of the identity "
        f"is mixed into each layer for the residual stream, and the row at the readout position is taken (Abnar & "
        f"Zuidema 2020).{_restrictions(rolled)}",
        "Special tokens count as attended to. Padding is left out.",
        f"Comprehensiveness is p(y|x) − p(y|x without r), sufficiency is p(y|x) − p(y|r alone), and y is {explained} "
        f"(DeYoung et al. 2020). r are the first tokens of the ranking, {cuts} % of those that can be removed, rounded "
        f"up, at least one; the value shown is the mean over these cuts. Tokens are "
        f"{_REMOVALS[removed['removal']]}. {readout}",
        "AUPRC is the average precision of the ranking against the rationale, averaged over annotators. Mass on "
        "relevant tokens is the attention on them; for signed attributions it is their share of the attribution in "
        "favour of the prediction.",
        f"Intervals are 95 % bootstrap intervals over examples ({settings['resamples']} resamples, seed "
        f"{settings['seed']}); shares that are 0 or 1 in every example have exact binomial intervals. Random rankings "
        f"are drawn {settings['draws']} times for each example with seed {settings['seed']}.",
    ]
    delta = described["integrated_gradients_delta"]
    if delta is not None:
        said.append(
            f"Integrated gradients take {settings['steps']} steps from the zero embedding; the sums of attributions "
            f"differ from the change of the log-probability by at most {number(delta, 2)}."
        )
    if settings["convention"] == "paper":
        paper = settings["paper_readout"]
        said.append(
            f"The convention is that of the paper's released code: sequences are padded to {paper['padded_length']} "
            f"tokens, padding is {'masked' if paper['pad_mask'] else 'not masked'}, and rollout is taken at the "
            f"position where that code takes it; examples without relevant tokens count as attention 0; a cut is a "
            f"share of the padded length, and the tokens that sufficiency keeps are in the order of a partial sort."
        )
    else:
        said.append("The convention is the standard one, which differs from that of the paper's released code.")
    return said


def _identity(residual: float | list[float]) -> str:
    """Return the share of the identity in words: one for all layers, or one for each."""
    return ", ".join(map(percent, residual)) if isinstance(residual, list) else percent(residual)


def _restrictions(rolled: dict[str, Any]) -> str:
    """Return sentences on the rollout's layers and discarded keys, if these differ from the defaults."""
    sentences = ""
    if rolled["layers"] is not None:
        sentences += f" Only layers {', '.join(map(str, rolled['layers']))} take part."
    if rolled["discard"]:
        sentences += f" Of each query's keys, at most {percent(rolled['discard'])} are dropped, smallest first."
    return sentences
