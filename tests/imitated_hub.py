"""A folder that answers as the model hub does when a web server serves it."""

import json
from pathlib import Path

_COMMIT = 40 * "a"


def lay_out_hub(folder: Path, model: str, branches: list[str], tags: list[str]) -> dict[str, Path]:
    """Write the hub's answers about a model, and return by revision the empty folder for its files.

    Call `list_files` when the files are there.
    """
    api = folder / "api" / "models" / model
    for kind in ("revision", "tree"):
        (api / kind).mkdir(parents=True)
    references = {
        kind: [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": _COMMIT} for name in names]
        for kind, names in (("branches", branches), ("tags", tags))
    }
    (api / "refs").write_text(json.dumps({**references, "converts": []}))
    # The answer to a question about the model as a whole.
    (api / "index.html").write_text(json.dumps({"id": model, "sha": _COMMIT}))
    files = {}
    for name in (*branches, *tags):
        (api / "revision" / name).write_text(json.dumps({"id": model, "sha": _COMMIT}))
        files[name] = folder / model / "resolve" / name
        files[name].mkdir(parents=True)
    return files


def list_files(folder: Path, model: str, files: dict[str, Path]) -> None:
    """Write the hub's lists of the files of each revision; the number of the revision stands for a content hash."""
    for number, (name, revision) in enumerate(files.items()):
        tree = [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": f"{number:040d}"}
            for path in revision.iterdir()
        ]
        (folder / "api" / "models" / model / "tree" / name).write_text(json.dumps(tree))
