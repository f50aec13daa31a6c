"""A folder that answers as the model hub does when a web server serves it."""

import json
from pathlib import Path


def lay_out_hub(folder: Path, model: str, branches: list[str], tags: list[str]) -> dict[str, Path]:
    """Write the hub's answers about a model, and return by revision the empty folder for its files.

    Call `list_files` when the files are there.
    """
    api = folder / "api" / "models" / model
    for kind in ("revision", "tree"):
        (api / kind).mkdir(parents=True)
    commits = {name: f"{number + 10:040x}" for number, name in enumerate((*branches, *tags))}
    references = {
        kind: [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commits[name]} for name in names]
        for kind, names in (("branches", branches), ("tags", tags))
    }
    (api / "refs").write_text(json.dumps({**references, "converts": []}))
    # The answer to a question about the model as a whole.
    main = commits.get("main", next(iter(commits.values())))
    (api / "index.html").write_text(json.dumps({"id": model, "sha": main}))
    files = {}
    for name, commit in commits.items():
        (api / "revision" / name).write_text(json.dumps({"id": model, "sha": commit}))
        of_commit = folder / model / "resolve" / commit
        of_commit.mkdir(parents=True)
        files[name] = of_commit.with_name(name)
        files[name].symlink_to(commit)
    return files


def list_files(folder: Path, model: str, files: dict[str, Path]) -> None:
    """Write the hub's lists of the files of each revision; the number of the revision stands for a content hash.

    The list of a revision has the files of its folders as well, as the hub's has if it is asked for them.
    """
    for number, (name, revision) in enumerate(files.items()):
        answers = folder / "api" / "models" / model / "tree" / name
        tree = [
            {
                "type": "file",
                "path": str(path.relative_to(revision)),
                "size": path.stat().st_size,
                "oid": f"{number:040d}",
            }
            for path in sorted(revision.rglob("*"))
            if path.is_file()
        ]
        below = sorted(path.name for path in revision.iterdir() if path.is_dir())
        if not below:
            answers.write_text(json.dumps(tree))
            continue
        for part in ("", *below):
            listed = [each for each in tree if each["path"].startswith(part)]
            (answers / part).mkdir(parents=True, exist_ok=True)
            (answers / part / "index.html").write_text(json.dumps(listed))
