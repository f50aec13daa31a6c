"""What a training script imports comes without the libraries that only some of it needs."""

import subprocess
import sys


def test_importing_is_light():
    heavy = {"transformers", "transformer_lens", "captum", "datasets", "matplotlib", "plotly"}
    code = f"import sys, qkov.probes; print(*({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == ""
