"""What a reproduction trains: the setting, the ratios, the losses, and the batches of runs that follow from them."""

from dataclasses import dataclass, field

from ..dynamics.setting import Parameterization, Setting, Start


@dataclass(frozen=True)
class Plan:
    """What a reproduction trains.

    With one relevant token in a sequence (m = 1), runs that start exactly on the fixed directions stay close to them,
    although noise added to the start would grow; see docs/theory. With several relevant tokens, the tokens of a class
    compete for attention: any difference between them, even one of rounding, grows at a rate that rises with r, and at
    r = 100 a run leaves the symmetric solution that the theory describes.

    Attributes:
        setting: the setting of the exact population.
        ratios: the ratios r = eta_QK / eta_OV.
        losses: the losses at which runs are compared. Every run passes exactly through each of them and ends at the
            last one.
        step: relative size of a step of gradient descent.
        checkpoints: approximate number of checkpoints saved of each run at log-spaced steps, in addition to one at each
            loss.
        imbalance: imbalance of the unbalanced run: ln D of its factors A D, D^{-1} B runs from 0 to this value.
        spread: spread of the balanced run whose singular values are not all equal: ln E of its factors A E, E B runs
            from 0 to this value.
        extra_ratio: ratio r of these two runs.
    """

    setting: Setting = field(default_factory=lambda: Setting(M=4, b=4, m=1, n=4, query="token"))
    ratios: tuple[float, ...] = (0.01, 1.0, 100.0)
    losses: tuple[float, ...] = (1.0, 0.5, 0.1, 0.01, 1e-4, 1e-6, 1e-8)
    step: float = 0.004
    checkpoints: int = 40
    imbalance: float = 1.5
    spread: float = 1.0
    extra_ratio: float = 1.0

    @classmethod
    def quick(cls) -> "Plan":
        """Return a plan with larger steps, fewer checkpoints and an end at a loss of 1e-4."""
        return cls(losses=(1.0, 0.5, 0.1, 0.01, 1e-4), step=0.02, checkpoints=16)

    def batches(self) -> list["Batch"]:
        """Return the batches of runs to train: the balanced ones, the rescaled one, and the two extra runs."""
        fafo_start = Start.default(Parameterization.FAFO)
        return [
            *(Batch("balanced", chosen, self.ratios, Start.default(chosen)) for chosen in Parameterization),
            Batch("rescaled", Parameterization.CACO, self.ratios, fafo_start),
            Batch("spread", Parameterization.FAFO, (self.extra_ratio,), fafo_start, spread=self.spread),
            Batch("unbalanced", Parameterization.FAFO, (self.extra_ratio,), fafo_start, imbalance=self.imbalance),
        ]


@dataclass(frozen=True)
class Batch:
    """Runs that train as one batched computation, with one parameterization, one start and several ratios.

    Attributes:
        kind: the kind of the runs, as in `Run`.
        parameterization: which circuits are factorized.
        ratios: the ratio r of each run.
        start: the scales at time 0.
        imbalance: imbalance of the start's factors.
        spread: spread of the start's singular values.
    """

    kind: str
    parameterization: Parameterization
    ratios: tuple[float, ...]
    start: Start
    imbalance: float = 0.0
    spread: float = 0.0

    def name(self, ratio: float) -> str:
        """Return the name of the run at a ratio."""
        kind = "" if self.kind == "balanced" else f"_{self.kind}"
        return f"{self.parameterization.value}{kind}_r{ratio:g}"
