"""All tables of a reproduction, each made once."""

from dataclasses import dataclass

import pandas as pd

from .comparison import (
    RatioReading,
    Trajectories,
    flow_table,
    long_after_table,
    matched_loss_table,
    preconditioner_table,
    read_ratios,
    rescaled_table,
    trajectories,
)
from .growth import GrowthReading, read_growth
from .reproduction import Reproduction


@dataclass(frozen=True)
class Tables:
    """What a reproduction measured, and what it comes to against the theory; see the functions of the same names."""

    reproduction: Reproduction
    measured: Trajectories
    matched: pd.DataFrame
    long_after: pd.DataFrame
    readings: list[RatioReading]
    flow: pd.DataFrame
    rescaled: pd.DataFrame
    growth: list[GrowthReading]
    preconditioner: pd.DataFrame


def all_tables(reproduction: Reproduction) -> Tables:
    """Return every table of a finished reproduction, from its stores."""
    measured = trajectories(reproduction)
    return Tables(
        reproduction=reproduction,
        measured=measured,
        matched=matched_loss_table(reproduction, measured),
        long_after=long_after_table(reproduction, measured),
        readings=read_ratios(reproduction, measured),
        flow=flow_table(reproduction, measured),
        rescaled=rescaled_table(reproduction, measured),
        growth=read_growth(reproduction, measured),
        preconditioner=preconditioner_table(reproduction, measured),
    )
