"""The settings of an explanation."""

from dataclasses import dataclass, field

from ....circuits.errors import CallError
from ..intervals import Bootstrap
from ..measures.paper_readout import PaperReadout
from ..measures.registry import MEASURES
from ..measures.rollout import ABNAR_ZUIDEMA, Rollout
from ..models.alternatives import Target
from ..paper_convention import Convention
from ..rationales.attribution import METHODS, quick_methods
from ..rationales.faithfulness import RANDOM
from ..rationales.perturbation import ERASER, Perturbation
from ..relevance.summary import HALF, Thresholds


@dataclass(frozen=True)
class ExplanationSettings:
    """What `explain` measures: the methods, how attention is read, and how tokens are removed.

    Attributes:
        methods: names in `METHODS`; by default the quick ones. The first one is examined in detail and has to be an
            attention measure.
        rollout: settings of the attention measures: how heads are fused, how much of the identity is mixed in, and
            which layers take part.
        perturbation: how tokens are removed for comprehensiveness and sufficiency.
        target: the alternative whose probability is explained: "predicted", what the model predicts, or "label", the
            example's label.
        thresholds: thresholds of AC and ACMC.
        draws: number of random rankings of each example.
        steps: number of steps of integrated gradients.
        resamples: number of resamples of the bootstrap.
        seed: seed of the random rankings and of the bootstrap.
        batch_tokens: largest number of tokens in one run of the model.
        paper_readout: how the rollout is read from padded sequences, as in the paper's released code; examples without
            a relevant token then count as well. None, the default, for the standard convention. The convention of the
            perturbation has to be the same.

    Raises:
        CallError: A method is unknown or named twice, the first is not an attention measure, `draws` is below 1 for
            random rankings, or the conventions differ.
    """

    methods: tuple[str, ...] = field(default_factory=quick_methods)
    rollout: Rollout = ABNAR_ZUIDEMA
    perturbation: Perturbation = ERASER
    target: Target = "predicted"
    thresholds: Thresholds = HALF
    draws: int = 5
    steps: int = 64
    resamples: int = 1999
    seed: int = 0
    batch_tokens: int = 2048
    paper_readout: PaperReadout | None = None

    def __post_init__(self) -> None:
        """Refuse settings that do not fit together."""
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise CallError(
                f"there is no method {', '.join(map(repr, unknown))}; expected some of {', '.join(METHODS)}"
            )
        if len(set(self.methods)) < len(self.methods):
            raise CallError(f"a method is named twice in {', '.join(self.methods)}")
        if not self.methods or self.methods[0] not in MEASURES:
            raise CallError(
                f"the first method is examined in detail; expected an attention measure there, one of "
                f"{', '.join(MEASURES)}"
            )
        if RANDOM in self.methods and self.draws < 1:
            raise CallError(f"draws should be 1 or more for {RANDOM} rankings, got {self.draws}")
        if self.convention != self.perturbation.convention:
            raise CallError(
                f"attention is read in the {self.convention} convention, but tokens are removed in the "
                f"{self.perturbation.convention} convention; expected the same for both"
            )

    @property
    def convention(self) -> Convention:
        """The convention of the readout: "standard", or "paper" with a `paper_readout`."""
        return "standard" if self.paper_readout is None else "paper"

    @property
    def main(self) -> str:
        """The method that is examined in detail."""
        return self.methods[0]

    @property
    def bootstrap(self) -> Bootstrap:
        """The settings of the intervals."""
        return Bootstrap(resamples=self.resamples, seed=self.seed)
