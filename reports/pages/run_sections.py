"""The quantities of a run store that a report draws, section by section."""

from dataclasses import dataclass

#: The circuits as titles show them, in mathtext.
CIRCUITS = {"QK": r"$W_{QK}$", "OV": r"$W_{OV}$"}


@dataclass(frozen=True)
class Quantity:
    """A quantity of the store as it is drawn: one panel for each circuit that has it.

    Attributes:
        column: The column of the store's table.
        label: The title of its panels, after the name of the circuit.
        circuits: The circuits that have the quantity.
        log: Whether it is drawn on a logarithmic axis.
        limits: The limits of the vertical axis; None for those that the values need.
    """

    column: str
    label: str
    circuits: tuple[str, ...] = ("QK", "OV")
    log: bool = False
    limits: tuple[float | None, float | None] = (None, None)


#: The title, the caption and the quantities of each section.
SECTIONS: tuple[tuple[str, str, tuple[Quantity, ...]], ...] = (
    (
        "How large are the circuits?",
        "Frobenius, spectral and nuclear norm: the root of the sum of the squared singular values, the largest "
        "singular value, and their sum.",
        (
            Quantity("frobenius_norm", "Frobenius norm"),
            Quantity("spectral_norm", "spectral norm"),
            Quantity("nuclear_norm", "nuclear norm"),
        ),
    ),
    (
        "How many directions do they use?",
        "Stable rank, ‖C‖²/s₁², and effective rank, the exponential of the entropy of the normalised singular "
        "values (Roy & Vetterli 2007).",
        (Quantity("stable_rank", "stable rank"), Quantity("effective_rank", "effective rank")),
    ),
    (
        "How fast do they move, and where to?",
        "Relative speed is ‖ΔC‖/‖C‖ per training step since the previous checkpoint. The effective ratio r(t) is the "
        "relative speed of W_QK over that of W_OV: a ratio of speeds, read from the weights alone, which is not a "
        "ratio of learning rates. Cosine and scale are along the reference.",
        (
            Quantity("relative_speed", "relative speed per step", log=True),
            Quantity("reference_cosine", "cosine with reference", limits=(-1.05, 1.05)),
            Quantity("reference_scale", "scale along reference"),
            Quantity("effective_ratio", "effective ratio $r(t)$", circuits=("QK",), log=True),
        ),
    ),
    (
        "How does gradient descent on the factors move them?",
        "Ω(C) = (CᵀC)^½ ⊕ (CCᵀ)^½ describes how gradient flow on balanced factors moves their product. Its rate along "
        "C itself is 2Σs³/Σs². Imbalance is ‖AᵀA − BBᵀ‖/(‖AᵀA‖ + ‖BBᵀ‖). The differences compare the two sides of Ω "
        "with AAᵀ and BᵀB, which the factors give, relative to those: 0 means that Ω is the exact operator.",
        (
            Quantity("omega_self", r"rate of $\Omega$ along $C$"),
            Quantity("imbalance", "imbalance of the factors", limits=(-0.02, 1.02)),
            Quantity("agreement_rows_difference", r"$\Omega$ against $AA^T$, difference"),
            Quantity("agreement_columns_difference", r"$\Omega$ against $B^TB$, difference"),
        ),
    ),
    (
        "The preconditioner at every logged step",
        "These values come from the gradients of the factors A and B of C = AB. E = A ∂L/∂B + ∂L/∂A B is the step of "
        "plain gradient descent, apart from sign and rate, and ΩG = Ω(C) ∂L/∂C is the step that Ω makes of the "
        "gradient: their cosine is 1 and the error ‖ΩG − E‖/‖E‖ is 0 where the factors are balanced. The step that the "
        "optimizer took has cosine 1 with −E if the optimizer is plain gradient descent at a small rate; its rate "
        "along −E, ⟨ΔC, −E⟩/‖E‖², is the rate at which plain gradient descent goes as far. Biases are included as a "
        "row of the factors, and heads that share keys and values are taken together.",
        (
            Quantity("omega_cosine", r"cosine of $\Omega G$ and $E$"),
            Quantity("omega_relative_error", r"error of $\Omega G$ against $E$", limits=(0.0, None)),
            Quantity("taken_exact_cosine", "cosine of taken step and $-E$", limits=(-1.05, 1.05)),
            Quantity("taken_rate", "rate of taken step along $-E$"),
        ),
    ),
    (
        "What do they compute?",
        "The symmetric share of the squared norm (0.5 for a random matrix), and the score Σ Re λ / Σ |λ| of the "
        "eigenvalues of W_OV itself, without embedding and unembedding, which is positive if a head writes what it "
        "reads (after the copying score of Elhage et al. 2021).",
        (
            Quantity("symmetric_share", "symmetric share", limits=(-0.02, 1.02)),
            Quantity("copying_score", "copying score", circuits=("OV",), limits=(-1.05, 1.05)),
        ),
    ),
)
