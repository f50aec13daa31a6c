"""Models for the measures, from an object, a folder, a file or the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ....circuits.checkpoints.runs import find_checkpoints
from ....circuits.errors import CallError, QkovError, named_input, reason
from ....circuits.live.hooked_models import has_weight_interface
from ....circuits.live.lens_models import load_lens_model
from ....circuits.storage.lens import LensModel, is_lens, lens_checkpoints, lens_model, quiet
from ...dynamics.model import SingleLayerAttention
from ..maps.search import source_of, unwrapped_model
from .addresses import ModelAddress, model_address
from .model import AttentionModel
from .model_maps import demand_one_stack
from .single_layer import SingleLayerModel
from .tokenisers import tokeniser_beside
from .torch_model import TorchModel
from .transformer_lens import HookedModel
from .transformers import TransformersCausalLM, TransformersClassifier, TransformersMaskedLM, demand_text

#: What a model predicts: classes of a sequence, the next token, or the token at a mask.
Kind = Literal["classifier", "causal", "masked"]
KINDS: tuple[Kind, ...] = ("classifier", "causal", "masked")

_ENDINGS: dict[str, Kind] = {
    "ForSequenceClassification": "classifier",
    "ForMaskedLM": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
}
_CLASSES: dict[Kind, str] = {
    "classifier": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
}


def load_model(
    source: Any,
    kind: Kind | None = None,
    *,
    mask_token: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> AttentionModel:
    """Return a model as the measures use it.

    A model object is left as it was. It runs in evaluation mode (without dropout) and, if it is a model of
    transformers, with eager attention, but only during calls; its own mode and attention implementation are restored
    after each call.

    Args:
        source: A model of transformers, one with TransformerLens' hooks, or a module that attends by
            torch.nn.MultiheadAttention, takes token ids and returns logits (see `TorchModel`); or an address: a folder
            that transformers saved, a GGUF file, a name on the hub or `name@revision`, `lens:NAME` or
            `lens:NAME@LABEL` for a model that TransformerLens names, a checkpoint of `qkov reproduce`, or the folder of
            a run of transformers' Trainer or of qkov, whose last checkpoint is loaded
            (`AttentionModel.chosen_checkpoint` says which).
        kind: "classifier", "causal" or "masked", if neither the class nor the config of the model says which it is.
        mask_token: The id that stands for a removed token, if there is no tokenizer beside the model that has one.
        dtype: The type of the weights of a model of transformers that is loaded from an address.
        device: The device that such a model is loaded to.

    Raises:
        CallError: The source is none of these, or there is no single row of attention behind the model's prediction.
        QkovError: The model or the last checkpoint of a run cannot be loaded, or its files lack weights that this kind
            of model needs.
    """
    if kind is not None and kind not in KINDS:
        raise CallError(f"kind should be one of {', '.join(KINDS)}, got {kind!r}")
    if isinstance(source, AttentionModel):
        return source
    if isinstance(source, SingleLayerAttention):
        raise CallError("a SingleLayerAttention needs the vectors of its tokens: SingleLayerModel(model, embedding)")
    if isinstance(source, (str, Path)):
        return _from_address(str(source), kind, mask_token, dtype, device)
    if isinstance(source, nn.Module):
        source = unwrapped_model(source)
    with _in_one_line(type(source).__name__):
        return _of_object(source, kind, mask_token)


@contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """Turn whatever a model raises on a trial run into a refusal of it.

    Raises:
        CallError: The model could not be run.
    """
    try:
        yield
    except QkovError:
        raise
    except Exception as error:
        raise CallError(
            f"{name} could not be run on a short sequence of tokens as qkov runs models of text, so explain does not "
            f"support it ({type(error).__name__}: {reason(error)})"
        ) from error


def _of_object(source: Any, kind: Kind | None, mask_token: int | None) -> AttentionModel:
    name = type(source).__name__
    if has_weight_interface(source) and hasattr(source, "hooks"):
        return HookedModel(source, mask_token=mask_token)
    if hasattr(source, "config") and hasattr(source, "get_input_embeddings"):
        demand_text(source, name)
        return _of_kind(source, kind or _kind_of([name], name), None, mask_token)
    if isinstance(source, nn.Module):
        source_of(source)
        kind = kind or _kind_of([name], name)
        if kind == "masked":
            raise CallError(f"{name} is not a model of transformers; its kind should be classifier or causal")
        return TorchModel(source, kind, mask_token=mask_token)
    raise CallError(
        f"expected a model of transformers, one with TransformerLens' hooks, a torch.nn.Module with attention, or an "
        f"address, got {name}"
    )


def _from_address(
    address: str, kind: Kind | None, mask_token: int | None, dtype: torch.dtype, device: str
) -> AttentionModel:
    if is_lens(address) and lens_model(address).in_own_format:
        return _by_transformer_lens(lens_model(address), kind, mask_token, dtype, device)
    path = Path(address)
    if path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("step_*.safetensors"))):
        return SingleLayerModel.open(find_checkpoints(path)[-1].address if path.is_dir() else path)
    found = model_address(address)
    path = Path(found.name)
    if path.exists() and not path.is_dir():
        raise CallError(
            f"{address} is a file; expected a folder that transformers saved, a .gguf file, a .safetensors file of "
            f"qkov reproduce, or a name on the hub"
        )
    if path.is_dir() and not found.is_gguf and not (path / "config.json").is_file():
        raise CallError(
            f"{path} has no config.json and no step_*.safetensors, so it does not hold a model that qkov can run"
        )
    if not found.is_gguf:
        _demand_files(path)
    model = _from_transformers(found, kind, mask_token, dtype, device)
    model.chosen_checkpoint = found.chosen
    return model


def _by_transformer_lens(
    model: LensModel, kind: Kind | None, mask_token: int | None, dtype: torch.dtype, device: str
) -> AttentionModel:
    """Return a model in TransformerLens' own format."""
    if kind not in (None, "causal"):
        raise CallError(f"{model} is a causal language model; got the kind {kind}")
    if model.label is not None:
        lens_checkpoints(model)
    loaded = load_lens_model(model)
    # A bridge prints what it is moved to.
    with _in_one_line(str(model)), quiet():
        # HookedTransformer takes one at a time.
        return HookedModel(loaded.to(device).to(dtype), name=str(model), mask_token=mask_token)


def _demand_files(folder: Path) -> None:
    """Refuse a folder with a pipe or a device in it, for which transformers would wait."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    strange = next((entry for entry in entries if entry.exists() and not (entry.is_file() or entry.is_dir())), None)
    if strange is not None:
        raise QkovError(f"{strange} is a pipe, a device or a socket; expected a regular file")


def _from_transformers(
    found: ModelAddress, kind: Kind | None, mask_token: int | None, dtype: torch.dtype, device: str
) -> AttentionModel:
    import transformers

    address = found.shown
    with named_input(address, "a model of transformers", "give the folder or the name of one"):
        config = found.loaded_by(transformers.AutoConfig.from_pretrained)
        if config.is_encoder_decoder:
            demand_one_stack({"encoder", "decoder"}, address)
        chosen = kind or ("causal" if found.is_gguf else _kind_of(config.architectures or [], address))
        model, loading_info = found.loaded_by(
            getattr(transformers, _CLASSES[chosen]).from_pretrained,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise QkovError(
            f"{address} lacks {len(missing)} weights of a {chosen} model, which would be random, such as {missing[0]}; "
            f"train it for the task first, or choose another kind ({', '.join(KINDS)})"
        )
    if mask_token is None and not found.is_gguf:
        mask_token = _mask_token(found)
    with _in_one_line(address):
        return _of_kind(model.to(device), chosen, address, mask_token)


def _of_kind(model: Any, kind: Kind, name: str | None, mask_token: int | None) -> AttentionModel:
    if kind == "masked":
        if mask_token is None:
            raise CallError(
                "a masked language model is read at its mask token; give the id of that token as mask_token"
            )
        return TransformersMaskedLM(model, mask_token=mask_token, name=name)
    if kind == "classifier":
        return TransformersClassifier(model, name=name, mask_token=mask_token)
    return TransformersCausalLM(model, name=name, mask_token=mask_token)


def _kind_of(classes: list[str], name: str) -> Kind:
    for class_name in classes:
        for ending, kind in _ENDINGS.items():
            if class_name.endswith(ending):
                return kind
    raise CallError(
        f"nothing shows whether {name} classifies or predicts tokens (class: {', '.join(classes) or 'not stated'}); "
        f"give its kind: {', '.join(KINDS)}"
    )


def _mask_token(found: ModelAddress) -> int | None:
    """Return the mask token's id from the tokenizer beside the model, if there is one."""
    try:
        return tokeniser_beside(found).mask_token_id
    except QkovError:
        return None
