"""The figures of the store that a report draws, section by section."""

from dataclasses import dataclass

#: How the circuits are written in titles.
CIRCUITS = {"QK": r"$W_{QK}$", "OV": r"$W_{OV}$"}


@dataclass(frozen=True)
class Figure:
    """One figure of the store as it is drawn: a panel for each circuit that has it."""

    column: str
    label: str
    circuits: tuple[str, ...] = ("QK", "OV")
    log: bool = False
    limits: tuple[float | None, float | None] = (None, None)


#: Title, caption and figures.
SECTIONS: tuple[tuple[str, str, tuple[Figure, ...]], ...] = (
    (
        "How large are the circuits?",
        "Frobenius, spectral and nuclear norm: the root of the sum of the squared singular values, the largest, and "
        "their sum.",
        (
            Figure("frobenius_norm", "Frobenius norm"),
            Figure("spectral_norm", "spectral norm"),
            Figure("nuclear_norm", "nuclear norm"),
        ),
    ),
    (
        "How many directions do they use?",
        "Stable rank ‖C‖²/s₁², and effective rank, the exponential of the entropy of the normalised singular "
        "values (Roy & Vetterli 2007).",
        (Figure("stable_rank", "stable rank"), Figure("effective_rank", "effective rank")),
    ),
    (
        "How fast do they move, and where to?",
        "Relative speed is ‖ΔC‖/‖C‖ for each step of training, since the checkpoint before. The effective ratio r(t) "
        "is that of W_QK over that of W_OV: a ratio of speeds, as the weights alone show them, which equals no ratio "
        "of learning rates. Cosine and scale are along the reference.",
        (
            Figure("relative_speed", "relative speed per step", log=True),
            Figure("reference_cosine", "cosine with reference", limits=(-1.05, 1.05)),
            Figure("reference_scale", "scale along reference"),
            Figure("effective_ratio", "effective ratio $r(t)$", circuits=("QK",), log=True),
        ),
    ),
    (
        "How does gradient descent on the factors move them?",
        "Ω(C) = (CᵀC)^½ ⊕ (CCᵀ)^½ is how gradient flow on balanced factors moves their product. Its rate along C "
        "itself is 2Σs³/Σs². Imbalance is ‖AᵀA − BBᵀ‖/(‖AᵀA‖ + ‖BBᵀ‖). The differences compare Ω's two sides with AAᵀ "
        "and BᵀB, of the factors themselves, relative to those: 0 where Ω is the exact operator.",
        (
            Figure("omega_self", r"rate of $\Omega$ along $C$"),
            Figure("imbalance", "imbalance of the factors", limits=(-0.02, 1.02)),
            Figure("agreement_rows_difference", r"$\Omega$ against $AA^T$, difference"),
            Figure("agreement_columns_difference", r"$\Omega$ against $B^TB$, difference"),
        ),
    ),
    (
        "The preconditioner at every logged step",
        "From the gradients of the factors A and B of C = AB. E = A ∂L/∂B + ∂L/∂A B is the step that plain gradient "
        "descent takes, but for its sign and rate, and ΩG = Ω(C) ∂L/∂C the one that Ω makes of the gradient: their "
        "cosine is 1 and the error ‖ΩG − E‖/‖E‖ is 0 where the factors balance. The step that the optimizer took has "
        "cosine 1 with −E where it is plain gradient descent at a small rate; its rate along −E, ⟨ΔC, −E⟩/‖E‖², is "
        "the one at which plain gradient descent goes as far. All with the biases as a row of the factors, and of "
        "heads that share keys and values together.",
        (
            Figure("omega_cosine", r"cosine of $\Omega G$ and $E$"),
            Figure("omega_relative_error", r"error of $\Omega G$ against $E$", limits=(0.0, None)),
            Figure("taken_exact_cosine", "cosine of taken step and $-E$", limits=(-1.05, 1.05)),
            Figure("taken_rate", "rate of taken step along $-E$"),
        ),
    ),
    (
        "What do they compute?",
        "Share of the squared norm that is symmetric (0.5 for a random matrix), and the score Σ Re λ / Σ |λ| of the "
        "eigenvalues of W_OV itself, without embedding and unembedding: positive where a head writes what it reads "
        "(after the copying score of Elhage et al. 2021).",
        (
            Figure("symmetric_share", "symmetric share", limits=(-0.02, 1.02)),
            Figure("copying_score", "copying score", circuits=("OV",), limits=(-1.05, 1.05)),
        ),
    ),
)
