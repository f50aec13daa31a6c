"""Run the commands and the code of a page in a folder of its own."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkov.reports.commands.main import run

from ..circuits.range_server import serving
from .pages import Block, Command, blocks, commands
from .world import build_hub, build_world

#: A command that trains; it is run once for all pages.
REPRODUCE = ("reproduce", "--quick")


@dataclass
class Reader:
    """Somebody who types what the pages say.

    Attributes:
        scratch: a folder for what all pages share.
    """

    scratch: Path
    _printed: dict[tuple[str, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write the files that the pages name."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        build_world(self.scratch / "world")

    def read(self, page: str, folder: Path) -> Iterator[tuple[Block, Command | None, str]]:
        """Run a page's blocks in order in a folder, and yield each command with what it printed, and each code block.

        Raises:
            AssertionError: a command did not end with status 0.
        """
        shutil.copytree(self.scratch / "world", folder, dirs_exist_ok=True)
        # Pages begin where the README's first command has been run.
        self._reproduce(folder)
        names: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.chdir(folder):
            for block in blocks(page):
                if block.language == "python":
                    exec(compile(block.text, "the page's code", "exec"), names)
                    yield block, None, ""
                elif block.language in ("sh", "console"):
                    for command in commands(block):
                        yield block, command, self._run(command.words, folder)

    def _run(self, words: tuple[str, ...], folder: Path) -> str:
        if words[0] == "reproduce":
            return self._reproduce(folder)
        if "--address" in words:
            return self._on_a_cluster(words)
        if any(word.startswith("EleutherAI/") for word in words):
            return self._from_the_hub(words)
        return _printed(words)

    def _reproduce(self, folder: Path) -> str:
        kept = self.scratch / "qkov-reproduce"
        if not kept.exists():
            with contextlib.chdir(self.scratch):
                self._printed[REPRODUCE] = _printed(REPRODUCE)
        shutil.copytree(kept, folder / "qkov-reproduce", dirs_exist_ok=True)
        return self._printed[REPRODUCE]

    def _on_a_cluster(self, words: tuple[str, ...]) -> str:
        if "ray" in words:
            # Without an address Ray starts a cluster of this machine.
            return _printed(words[: words.index("--address")])
        from distributed import LocalCluster

        cluster: Any = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
        with cluster:
            return _printed(tuple(cluster.scheduler_address if word.startswith("tcp://") else word for word in words))

    def _from_the_hub(self, words: tuple[str, ...]) -> str:
        """What the command prints in a process whose hub is a server on this machine."""
        hub = self.scratch / "hub"
        (model,) = (word.partition("@")[0] for word in words if word.startswith("EleutherAI/"))
        if not (hub / model).exists():
            build_hub(hub, model)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        with serving(hub) as (address, traffic):
            traffic.codes = {"/revision/": "RevisionNotFound"}
            done = subprocess.run(
                [sys.executable, "-m", "qkov.reports", *words],
                env=inherited | {"HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1"},
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _printed(words: tuple[str, ...]) -> str:
    """What `qkov` prints for these words, which have to end with status 0."""
    output = io.StringIO()
    typed, sys.argv = sys.argv, ["qkov", *words]
    try:
        with contextlib.redirect_stdout(output):
            status = run(list(words))
    finally:
        sys.argv = typed
    assert status == 0, f"qkov {' '.join(words)} ended with status {status}"
    return output.getvalue()
