"""Inputs without a fault, of every kind and for every reader."""

import io
import json
from typing import Any

import numpy as np
import torch

from .data_sets import whole_data_sets
from .gguf_files import whole_gguf
from .inputs import Input
from .mappings import whole_mapping
from .stores import whole_store
from .weights import plain_file, safetensors_bytes, torch_tensors


def undamaged() -> list[Input]:
    """Return inputs that every reader reads: checkpoints of each format, a mapping, data sets and a store."""
    values = np.random.default_rng(0)
    tensors = {
        f"model.layers.{layer}.self_attn.{role}_proj.weight": values.normal(size=(8, 8)).astype(np.float32)
        for layer in range(2)
        for role in "qkvo"
    }
    config: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 8}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    stretched = config | {"rope_scaling": scaling, "max_position_embeddings": 256}
    weights = safetensors_bytes(*plain_file(tensors))
    shard = "model-00001-of-00001.safetensors"
    index = json.dumps({"weight_map": dict.fromkeys(tensors, shard)}).encode()
    described = {"config.json": json.dumps(config).encode()}
    return [
        Input("checkpoint", {"model.safetensors": weights, "config.json": json.dumps(stretched).encode()}),
        Input("checkpoint", {shard: weights, "model.safetensors.index.json": index, **described}),
        Input("checkpoint", {"lit_model.pth": _saved(tensors, True), "model_config.yaml": described["config.json"]}),
        Input("checkpoint", {"pytorch_model.bin": _saved(tensors, True), **described}),
        Input("checkpoint", {"pytorch_model.bin": _saved(tensors, False), **described}),
        whole_gguf(),
        whole_mapping(),
        *whole_data_sets(),
        Input("store", whole_store()),
        Input("report", whole_store()),
    ]


def _saved(tensors: dict[str, np.ndarray], zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(torch_tensors(tensors), buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()
