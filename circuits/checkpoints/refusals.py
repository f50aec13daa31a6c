"""The reasons why weights that exist cannot be read as they are, and what the user can do about each."""

import json
import re
from collections.abc import Callable
from fnmatch import fnmatch

from ..errors import named_input
from ..storage.places import Place
from .parallel.deepspeed import parts_in

_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.(safetensors|bin)")
_PART = re.compile(r".+-(\d{5})-of-(\d{5})\.gguf")
_VARIANT = re.compile(r"(model|pytorch_model)\.[\w\-]+\.(safetensors|bin)")

#: File names of other libraries' weights, and how to convert them to a format that can be read.
_FOREIGN = {
    "*.msgpack": "Flax weights: save them as safetensors with a version of transformers that has from_flax=True (4.x)",
    "*.h5": "TensorFlow weights: save them as safetensors with a version of transformers that has from_tf=True (4.x)",
    "*.ckpt.index": ("TensorFlow weights: save them as safetensors with transformers' conversion script for the model"),
    "*.onnx": "an ONNX graph: expected the weights from which it was exported",
}


def foreign_format(name: str) -> str | None:
    """Return which other library's weights a file of this name holds and how to convert them, or None."""
    return next((why for pattern, why in _FOREIGN.items() if fnmatch(name, pattern)), None)


def partial_weights(name: str) -> str | None:
    """Return a sentence for a file whose name says that it is one shard of several, or None for any other file."""
    shard = _SHARD.fullmatch(name)
    if shard is None or int(shard[2]) < 2:
        return None
    return f"this file is one of {int(shard[2])} shards of a model; give the folder or the index to read all layers"


def unreadable_collection(folder: Place, names: list[str]) -> str | None:
    """Return what a folder holds if it is an adapter or another program's parts of a model, or None.

    Args:
        folder: The folder.
        names: The names of its entries.

    Raises:
        QkovError: The configuration of an adapter is damaged.
    """
    return next((why for collection in _COLLECTIONS if (why := collection(folder, names))), None)


def parts_without_index(names: list[str]) -> str | None:
    """Return what a folder holds if none of its files of weights is a whole model, or None."""
    shards = [shard for name in names if (shard := _SHARD.fullmatch(name))]
    if shards:
        index = f"{shards[0][1]}.{shards[0][3]}.index.json"
        return f"shards of a model, such as {shards[0][0]}, but no {index}, which says what each holds; copy it as well"
    of_gguf = [name for name in names if name.endswith(".gguf")]
    if len(of_gguf) > 1 and all(_PART.fullmatch(name) for name in of_gguf):
        return (
            f"a model in {len(of_gguf)} parts ({of_gguf[0]}, {of_gguf[1]} ...); join them with "
            f"llama-gguf-split --merge {of_gguf[0]} OUT.gguf"
        )
    ranks = [name for name in names if re.fullmatch(r"consolidated\.\d\d\.pth", name)]
    if len(ranks) > 1:
        return (
            f"a model in {len(ranks)} parts, one for each device ({ranks[0]}, {ranks[1]} ...); merge them with "
            f"transformers' convert_llama_weights_to_hf.py"
        )
    variants = [name for name in names if _VARIANT.fullmatch(name)]
    if len(variants) > 1:
        return f"several variants of one model ({', '.join(variants)}); give the path of one of them"
    return None


def foreign_weights(names: list[str]) -> str | None:
    """Return which other library's weights a folder holds, or None."""
    return next((why for name in names if (why := foreign_format(name))), None)


def _adapter(folder: Place, names: list[str]) -> str | None:
    if not any(name == "adapter_config.json" or fnmatch(name, "adapter_model.*") for name in names):
        return None
    base = "its base model"
    if "adapter_config.json" in names:
        place = folder.child("adapter_config.json")
        content = place.read_bytes()
        with named_input(place, "the JSON of an adapter"):
            base = json.loads(content).get("base_model_name_or_path") or base
    return (
        f"a PEFT adapter, which is not a model by itself; merge it into {base} with peft's "
        f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(OUT)"
    )


def _distributed(folder: Place, names: list[str]) -> str | None:
    inner = sorted(name for name in names if fnmatch(name, "pytorch_model_fsdp_*"))
    if inner:
        return f"FSDP's parts of a model; merge them with `accelerate merge-weights {folder.child(inner[0])} OUT`"
    if any(name.endswith(".distcp") for name in names):
        return (
            "a distributed checkpoint of torch without its file .metadata, which says what each holds; copy it as well"
        )
    return None


def _megatron(_folder: Place, names: list[str]) -> str | None:
    if any(re.fullmatch(r"mp_rank_\d\d(_\d+)*", name) for name in names):
        return "Megatron's parts of a model; convert it to transformers' format with Megatron-LM's own tools"
    return None


_COLLECTIONS: tuple[Callable[[Place, list[str]], str | None], ...] = (_adapter, parts_in, _distributed, _megatron)
