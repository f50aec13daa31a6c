"""What all tests share."""

import os
import shutil
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
# Small matrices gain nothing from threads, and tests that run beside others lose by them.
torch.set_num_threads(1)

#: Real files from elsewhere; they are no part of the project.
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"the real files are not at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a browser; its absence is a failure where everything has to be tested."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    if os.environ.get("CI"):
        pytest.fail("no Chromium: CI has to install it")
    pytest.skip("no Chromium")
