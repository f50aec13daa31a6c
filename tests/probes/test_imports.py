"""What a training script imports comes without the libraries that only some of it needs."""

import subprocess
import sys

import pytest
import qkov.probes


def test_importing_is_light():
    heavy = {"transformers", "transformer_lens", "captum", "datasets", "matplotlib", "plotly"}
    code = f"import sys, qkov.probes; print(*({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == ""


def test_every_public_name_is_there():
    for name in qkov.probes.__all__:
        assert getattr(qkov.probes, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute Nothing"):
        getattr(qkov.probes, "Nothing")  # noqa: B009 (a name that no type checker knows)
