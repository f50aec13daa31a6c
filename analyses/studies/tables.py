"""All tables of a reproduction, each computed once."""

from dataclasses import dataclass

import pandas as pd

from .comparison import flow_table, long_after_table, matched_loss_table, preconditioner_table, rescaled_table
from .growth import GrowthComparison, compare_growth
from .ratios import RatioEstimate, estimate_ratios
from .reproduction import Reproduction
from .trajectories import Trajectories, trajectories


@dataclass(frozen=True)
class Tables:
    """The quantities that a reproduction measured, and their comparison with the theory.

    Attributes:
        reproduction: the finished reproduction.
        measured: from `trajectories`.
        matched: from `matched_loss_table`.
        long_after: from `long_after_table`.
        ratios: from `estimate_ratios`.
        flow: from `flow_table`.
        rescaled: from `rescaled_table`.
        growth: from `compare_growth`.
        preconditioner: from `preconditioner_table`.
    """

    reproduction: Reproduction
    measured: Trajectories
    matched: pd.DataFrame
    long_after: pd.DataFrame
    ratios: list[RatioEstimate]
    flow: pd.DataFrame
    rescaled: pd.DataFrame
    growth: list[GrowthComparison]
    preconditioner: pd.DataFrame


def all_tables(reproduction: Reproduction) -> Tables:
    """Return every table of a finished reproduction, from its stores."""
    measured = trajectories(reproduction)
    return Tables(
        reproduction=reproduction,
        measured=measured,
        matched=matched_loss_table(reproduction, measured),
        long_after=long_after_table(reproduction, measured),
        ratios=estimate_ratios(reproduction, measured),
        flow=flow_table(reproduction, measured),
        rescaled=rescaled_table(reproduction, measured),
        growth=compare_growth(reproduction, measured),
        preconditioner=preconditioner_table(reproduction, measured),
    )
