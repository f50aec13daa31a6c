"""What an explanation measures, and how."""

from dataclasses import dataclass

from ....circuits.errors import CallError
from ..intervals import Bootstrap
from ..measures.paper_readout import PaperReading
from ..measures.registry import MEASURES
from ..measures.rollout import ABNAR_ZUIDEMA, Rollout
from ..models.alternatives import Target
from ..paper_convention import Convention
from ..rationales.attribution import METHODS
from ..rationales.faithfulness import RANDOM
from ..rationales.perturbation import ERASER, Perturbation
from ..relevance.figures import HALF, Thresholds

#: Those that take no more than a few runs of the model; integrated gradients take many, and attention flow a maximum
#: flow for every token.
QUICK_METHODS = (
    "rollout",
    "last layer",
    "layer mean",
    "value norms",
    "gradient rollout",
    "attention x gradient",
    "input x gradient",
    "ablation",
    RANDOM,
)


@dataclass(frozen=True)
class ExplanationSettings:
    """How attention is read, what it is compared with, and how tokens are removed.

    Attributes:
        methods: names in `METHODS`. The first is looked at closely, and is a measure of attention.
        rollout: how maps are fused and rolled out.
        perturbation: how tokens are removed for comprehensiveness and sufficiency.
        target: whose probability is explained: of what the model predicts, or of the example's label.
        thresholds: of AC and ACMC.
        draws: how many random rankings each example gets.
        steps: of integrated gradients.
        resamples: of the bootstrap.
        seed: of the random rankings and of the bootstrap.
        batch_tokens: at most so many tokens go through the model at once.
        paper_reading: how the rollout is read of padded sequences as in the paper's released code, under whose
            convention examples without a relevant token count as well; None, by default, for the right convention. The
            perturbation is of the same one.

    Raises:
        CallError: a method is unknown or named twice, the first is no measure of attention, or the
            conventions differ.
    """

    methods: tuple[str, ...] = QUICK_METHODS
    rollout: Rollout = ABNAR_ZUIDEMA
    perturbation: Perturbation = ERASER
    target: Target = "predicted"
    thresholds: Thresholds = HALF
    draws: int = 5
    steps: int = 64
    resamples: int = 1999
    seed: int = 0
    batch_tokens: int = 2048
    paper_reading: PaperReading | None = None

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise CallError(f"there is no method {', '.join(map(repr, unknown))}; known are {', '.join(METHODS)}")
        if len(set(self.methods)) < len(self.methods):
            raise CallError(f"a method is named twice in {', '.join(self.methods)}")
        if not self.methods or self.methods[0] not in MEASURES:
            raise CallError(
                f"the first method is the one that is looked at closely; expected a measure of attention, one of "
                f"{', '.join(MEASURES)}"
            )
        if RANDOM in self.methods and self.draws < 1:
            raise CallError(f"draws should be 1 or more for {RANDOM} rankings, got {self.draws}")
        if self.convention != self.perturbation.convention:
            raise CallError(
                f"attention is read in the {self.convention} convention and tokens are removed in the "
                f"{self.perturbation.convention} one; expected the same for both"
            )

    @property
    def convention(self) -> Convention:
        """Which one."""
        return "right" if self.paper_reading is None else "paper"

    @property
    def main(self) -> str:
        """The method that is looked at closely."""
        return self.methods[0]

    @property
    def bootstrap(self) -> Bootstrap:
        """How intervals are drawn."""
        return Bootstrap(resamples=self.resamples, seed=self.seed)
