"""The files that the documentation's commands and code name, in small."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from qkov.analyses.trajectories import track

from ..analyses.tiny_models import CAUSAL, CLASSIFIERS, Tiny, small
from ..analyses.word_tokens import word_tokeniser
from ..imitated_hub import lay_out_hub, list_files
from .pages import PAGES, blocks

_PAIRS = [
    ("the key near the doors", "the keys near the doors", " is", " are"),
    ("the man by the tables", "the men by the tables", " likes", " like"),
    ("the friends by the door", "the friend by the door", " are", " is"),
]


def build_world(folder: Path) -> None:
    """Write checkpoints, models and data into a folder, under the names that the pages use."""
    _trainer_run(folder / "checkpoints")
    for name in ("run-a", "run-b"):
        _trainer_run(folder / name)
        track(folder / name, folder / f"qkov-{name}")
    _base_and_tuned(folder)
    _own_format(folder / "my_run")
    _unusual_names(folder)
    (mapping, *_) = (
        block.text for block in blocks(PAGES["docs/questions/mappings.md"].read_text()) if block.language == "toml"
    )
    (folder / "mapping.toml").write_text(mapping)
    # HateXplain has three classes, and the page's own data two.
    three = Tiny(
        "BertForSequenceClassification",
        lambda: small("BertConfig", num_labels=3, max_position_embeddings=256),
        "",
        False,
    )
    run = [(f"sentiment-run/checkpoint-{step}", CLASSIFIERS[0]) for step in (300, 600)]
    for name, tiny in (("model", CAUSAL[0]), ("classifier", three), ("sentiment", CLASSIFIERS[0]), *run):
        tiny.build().save_pretrained(folder / name)
        word_tokeniser().save_pretrained(folder / name)
    _data(folder)


def build_hub(folder: Path, model: str, steps: tuple[int, ...] = (0, 1, 2)) -> None:
    """Write a hub that holds revisions of a small model under a published name."""
    files = lay_out_hub(folder, model, branches=["main", *(f"step{step}" for step in steps)], tags=[])
    config = transformers.GPTNeoXConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    for seed, revision in enumerate(files.values()):
        torch.manual_seed(seed)
        transformers.GPTNeoXForCausalLM(config).save_pretrained(revision)
    list_files(folder, model, files)


def _trainer_run(folder: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=1, eos_token_id=1)
    for step in (250, 500):
        torch.manual_seed(step)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / f"checkpoint-{step}")


def _base_and_tuned(folder: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder / "base")
    attention: Any = model.transformer.h[1].attn
    with torch.no_grad():
        attention.c_attn.weight[:, :8] *= 1.3
        attention.c_proj.weight += 0.001 * torch.randn_like(attention.c_proj.weight)
    model.save_pretrained(folder / "tuned")


def _own_format(folder: Path) -> None:
    folder.mkdir()
    for step in (100, 200):
        torch.manual_seed(step)
        weights = {f"layers.0.attn.{side}_proj.weight": torch.randn(24, 24) for side in "qkvo"}
        weights |= {f"layers.0.norm_1.{part}": torch.randn(24) for part in ("weight", "bias")}
        torch.save({"model_state_dict": weights, "val_loss": 1.0 / step}, folder / f"step_{step}.pt")


def _unusual_names(folder: Path) -> None:
    names = [f"sweep/A_1_{task}_{step}.pt" for task in (1, 2) for step in (50, 100)]
    for seed, name in enumerate([*names, "sweep/A_1_1_init.pt", "sweep/untrained.pt"]):
        _layers(folder / name, seed, [0, 1])
    for seed, (step, layer) in enumerate((step, layer) for step in (50, 100) for layer in (0, 1)):
        _layers(folder / "spread" / str(step) / f"layer_{layer}.pt", seed, [layer])


def _layers(path: Path, seed: int, layers: list[int]) -> None:
    """Write layers with TransformerLens' names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    shapes = {"Q": (2, 12, 6), "K": (2, 12, 6), "V": (2, 12, 6), "O": (2, 6, 12)}
    state = {f"blocks.{layer}.attn.W_{side}": torch.randn(shape) for layer in layers for side, shape in shapes.items()}
    torch.save(state, path)


def _data(folder: Path) -> None:
    keys = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
    (folder / "nounpp_test.json").write_text(
        "\n".join(json.dumps(dict(zip(keys, pair, strict=True)) | {"case": "c"}) for pair in _PAIRS)
    )
    posts = [
        {"tokens": prefix.split(), "relevant": [0, 1, *[0] * (len(prefix.split()) - 2)], "label": label}
        for (prefix, *_), label in zip(_PAIRS, ("negative", "positive", "negative"), strict=True)
    ]
    (folder / "posts.jsonl").write_text("\n".join(map(json.dumps, posts)))
    # The paper's cut takes seven tokens, and an example has to have more.
    texts = [f"{prefix} by a good friend near the table".split() for prefix, *_ in _PAIRS]
    hateful = folder / "hatexplain"
    hateful.mkdir()
    dataset = {
        f"{number}_gab": {
            "post_id": f"{number}_gab",
            "annotators": [{"label": label, "annotator_id": annotator, "target": ["None"]} for annotator in range(3)],
            "rationales": [[0, 1, *[0] * (len(words) - 2)]] * 3,
            "post_tokens": words,
        }
        for number, (words, label) in enumerate(zip(texts, ("offensive", "normal", "offensive"), strict=True))
    }
    (hateful / "dataset.json").write_text(json.dumps(dataset))
    (hateful / "post_id_divisions.json").write_text(json.dumps({"train": [], "val": [], "test": list(dataset)}))
