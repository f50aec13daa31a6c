"""What a benchmark prints as the peak of a process is not that of the process that started it."""

import subprocess
import sys
from pathlib import Path

import numpy as np

PEAK = "from tests.benchmarks.memory import peak_bytes; print(peak_bytes())"


def test_the_peak_is_that_of_the_process_itself():
    large = np.ones(40 * 2**20)
    command = [sys.executable, "-c", PEAK]
    root = Path(__file__).parents[2]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout)
    assert 0 < peak < large.nbytes / 2
