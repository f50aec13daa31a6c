"""Which files of a folder are a model's weights, and why a folder's weights cannot be read as they are."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import PurePath

from ..errors import QkovError
from ..storage.places import Place
from .sharded_file import read_index

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")

#: What a model's own weights are called, the first of which counts.
_WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "lit_model.pth",
)
#: What training saves beside the weights.
_COMPANIONS = (
    *("optimizer*", "scheduler*", "scaler*", "sampler*", "rng_state*", "random_states*", "training_args.bin"),
    *("custom_checkpoint_*", "dl_state_dict*"),
)
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.(safetensors|bin)")
_VARIANT = re.compile(r"(model|pytorch_model)\.[\w\-]+\.(safetensors|bin)")

#: Other libraries' weights, and how they come into a form that can be read.
_FOREIGN = {
    "*.gguf": "GGUF weights: use transformers' from_pretrained(FOLDER, gguf_file=NAME), then save_pretrained(OUT)",
    "*.msgpack": "Flax weights: save them as safetensors with a version of transformers that has from_flax=True (4.x)",
    "*.h5": "TensorFlow weights: save them as safetensors with a version of transformers that has from_tf=True (4.x)",
    "*.ckpt.index": "TensorFlow weights: save them as safetensors with transformers' conversion script of the model",
    "*.onnx": "an ONNX graph: expected the weights from which it was exported",
}


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    Attributes:
        weights: the file or index of the one model whose folder it is.
        loose: other files of weights.
        refusal: why weights that are there cannot be read, and what helps.
        folders: in it.
        names: of all that is in it.
    """

    weights: Place | None
    loose: list[Place]
    refusal: str | None
    folders: list[Place] = field(repr=False)
    names: list[str] = field(repr=False)


def contents_of(folder: Place) -> Contents:
    """Look into a folder, without opening its weights.

    Raises:
        QkovError: the folder cannot be listed.
    """
    entries = {entry.name: entry for entry in folder.entries()}
    folders = [entry for name, entry in entries.items() if not name.startswith(".") and entry.is_folder()]
    names = list(entries)
    refusal = next((why for refused in _REFUSALS if (why := refused(folder, names))), None)
    several = _parts_of_one(names)
    found = next((name for name in _WEIGHTS if name in entries and not _is_left_over(name, entries)), None)
    if found is None:
        indices = [name for name in names if name.endswith((".safetensors.index.json", ".bin.index.json"))]
        found = indices[0] if len(indices) == 1 else None
    if found == "consolidated.00.pth" and "consolidated.01.pth" in entries:
        found = None
    if found is not None:
        return Contents(entries[found], [], None, folders, names)
    loose = [] if refusal or several else [entry for name, entry in entries.items() if _is_loose(name, entry)]
    if not loose:
        refusal = refusal or several or _foreign(names)
    return Contents(None, loose, refusal and f"{folder} holds {refusal}", folders, names)


def weights_of(folder: Place) -> Place:
    """Return the file or index that holds a folder's weights.

    Raises:
        QkovError: it holds none that can be read, or several models.
    """
    contents = contents_of(folder)
    if contents.weights is not None:
        return contents.weights
    if contents.refusal is not None:
        raise QkovError(contents.refusal)
    if len(contents.loose) == 1:
        return contents.loose[0]
    if contents.loose:
        names = ", ".join(place.name for place in contents.loose[:4])
        raise QkovError(f"{folder} holds {len(contents.loose)} files of weights ({names} ...): give the path of one")
    raise QkovError(nothing_in(folder, contents))


def nothing_in(folder: Place, contents: Contents) -> str:
    """Return the words for a folder that holds no weights."""
    held = ", ".join(contents.names[:8]) or "nothing"
    return f"{folder} holds no checkpoint: expected files that end in {', '.join(SUFFIXES)}, found {held}"


def foreign_format(name: str) -> str | None:
    """Return what weights of another library a file of that name holds, and what helps; None where it is no such."""
    return next((why for pattern, why in _FOREIGN.items() if fnmatch(name, pattern)), None)


def _is_left_over(name: str, entries: dict[str, Place]) -> bool:
    """Whether an index is that of an older save in parts, which are gone: its model is one file now."""
    if not name.endswith(".index.json") or name.removesuffix(".index.json") not in entries:
        return False
    return not set(read_index(entries[name]).values()) <= set(entries)


def _is_loose(name: str, entry: Place) -> bool:
    if PurePath(name).suffix not in SUFFIXES or any(fnmatch(name, pattern) for pattern in _COMPANIONS):
        return False
    return entry.is_file()


def other_shards(name: str) -> str | None:
    """Say in words that a file is one of several of a model, by its name; None where it is not."""
    found = _SHARD.fullmatch(name)
    if found is None or int(found[2]) < 2:
        return None
    return f"this file is one of {int(found[2])} of a model: give its folder, or its index, for all layers"


def _parts_of_one(names: list[str]) -> str | None:
    """Files that are no models by themselves."""
    shards = [found for name in names if (found := _SHARD.fullmatch(name))]
    if shards:
        index = f"{shards[0][1]}.{shards[0][3]}.index.json"
        return f"parts of a model, such as {shards[0][0]}, and no {index} that says which is where: copy that as well"
    ranks = [name for name in names if re.fullmatch(r"consolidated\.\d\d\.pth", name)]
    if len(ranks) > 1:
        return (
            f"a model in {len(ranks)} parts that were split for as many devices ({ranks[0]}, {ranks[1]} ...): merge "
            f"them with transformers' convert_llama_weights_to_hf.py"
        )
    variants = [name for name in names if _VARIANT.fullmatch(name)]
    if len(variants) > 1:
        return f"several variants of one model ({', '.join(variants)}): give the path of one of them"
    return None


def _foreign(names: list[str]) -> str | None:
    return next((why for name in names if (why := foreign_format(name))), None)


def _adapter(folder: Place, names: list[str]) -> str | None:
    if not any(name == "adapter_config.json" or fnmatch(name, "adapter_model.*") for name in names):
        return None
    base = "its base model"
    if "adapter_config.json" in names:
        place = folder.child("adapter_config.json")
        try:
            base = json.loads(place.read_bytes()).get("base_model_name_or_path") or base
        except (ValueError, AttributeError, RecursionError) as error:
            raise QkovError(f"{place} is damaged: expected the JSON of an adapter; copy it again") from error
    return (
        f"a PEFT adapter, which is no model by itself: merge it into {base} with peft's "
        f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(OUT)"
    )


def _deepspeed(folder: Place, names: list[str]) -> str | None:
    whole, step = folder, ""
    if "zero_to_fp32.py" not in names:
        if not any(fnmatch(name, "*_optim_states.pt") or fnmatch(name, "*_model_states.pt") for name in names):
            return None
        # The script stands in the folder around those of the steps.
        whole, step = folder.parent or folder, f" --tag {folder.name}"
    return f"DeepSpeed's parts of a model: merge them with `python {whole}/zero_to_fp32.py {whole} OUT{step}`"


def _distributed(folder: Place, names: list[str]) -> str | None:
    inner = sorted(name for name in names if fnmatch(name, "pytorch_model_fsdp_*"))
    if inner:
        return f"FSDP's parts of a model: merge them with `accelerate merge-weights {folder.child(inner[0])} OUT`"
    if any(name.endswith(".distcp") for name in names):
        return (
            f"a distributed checkpoint of torch: merge it with "
            f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} OUT.pt`"
        )
    return None


def _megatron(_folder: Place, names: list[str]) -> str | None:
    if any(re.fullmatch(r"mp_rank_\d\d(_\d+)*", name) for name in names):
        return "Megatron's parts of a model: convert it to transformers' form with Megatron-LM's own tools"
    return None


_REFUSALS: tuple[Callable[[Place, list[str]], str | None], ...] = (_adapter, _deepspeed, _distributed, _megatron)
