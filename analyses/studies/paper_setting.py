"""The setting of the paper's own simulation, from theory alone, beside the values that the paper prints."""

import numpy as np
import pandas as pd

from ..dynamics.matched_loss import at_loss
from ..dynamics.setting import Parameterization, Setting

#: The setting of the paper's own simulation (its Figure 4).
PAPER_SETTING = Setting(M=20, b=50, m=5, n=50, query="token")
#: The loss at which that simulation stops.
PAPER_LOSS = 1e-4
#: The values (mu_OV, mu_QK, alpha) that the paper prints for CACO, by ratio r.
PAPER_PRINTED = {0.01: (81.669, 0.559, 0.149), 0.1: (42.282, 1.395, 0.287)}


def paper_setting_table() -> pd.DataFrame:
    """Return mu_OV, mu_QK and alpha in the setting of the paper's simulation, from theory alone, at equal loss.

    Columns: parameterization, ratio, mu_ov, mu_qk, alpha, and mu_ov_printed, mu_qk_printed and alpha_printed, which are
    NaN where the paper prints no value. The rows r = 100 and r = 0.01 of CACO are the falsification test that the
    paper's review proposes.

    Source: Figure 4 of "Faster Query-Key Learning Sharpens Attention", and `at_loss`.
    """
    rows = []
    for parameterization in Parameterization:
        for ratio in (0.01, 0.1, 1.0, 10.0, 100.0):
            state = at_loss(PAPER_SETTING, parameterization, ratio, PAPER_LOSS)
            printed = PAPER_PRINTED.get(ratio) if parameterization is Parameterization.CACO else None
            rows.append(
                {
                    "parameterization": parameterization.value,
                    "ratio": ratio,
                    "mu_ov": float(state.mu_ov),
                    "mu_qk": float(state.mu_qk),
                    "alpha": float(state.attention),
                    **dict(
                        zip(("mu_ov_printed", "mu_qk_printed", "alpha_printed"), printed or [np.nan] * 3, strict=True)
                    ),
                }
            )
    return pd.DataFrame(rows)
