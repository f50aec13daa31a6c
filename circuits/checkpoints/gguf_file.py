"""GGUF files: the weights as transformers names and orders them, with the config that the metadata state.

llama.cpp's converter renames tensors, permutes the queries and keys of LLaMA, adds 1 to the gains of Gemma's norms and
transposes GPT-2's projections. All of this is undone here. Quantised tensors are dequantised as llama.cpp defines them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import QkovError, named_input
from ..storage.places import Place
from .tensor_file import TensorFile

if TYPE_CHECKING:
    from gguf import GGUFReader

_SEPARATE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
_OF_GPT2 = {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "attn_norm": "ln_1"}
#: Keys of transformers' configs for those of the metadata, which stand behind the name of the architecture.
_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_KEYS_OF_GPT2 = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


@dataclass(frozen=True)
class _Converted:
    """How llama.cpp's converter changes an architecture.

    Attributes:
        model_type: The architecture in transformers.
        names: The modules of a layer by their names in GGUF.
        prefix: What stands before the number of the layer.
        keys: The config's keys by those of the metadata.
        permuted: Whether the rows of queries and keys are permuted.
        gains_plus_one: Whether 1 was added to the gains of norms.
        transposed: Whether the projections are transposed.
    """

    model_type: str
    names: dict[str, str]
    prefix: str = "model.layers"
    keys: dict[str, str] | None = None
    permuted: bool = False
    gains_plus_one: bool = False
    transposed: bool = False


_ARCHITECTURES = {
    "llama": _Converted("llama", _SEPARATE, permuted=True),
    "qwen2": _Converted("qwen2", _SEPARATE),
    "qwen3": _Converted("qwen3", _SEPARATE),
    "gemma2": _Converted("gemma2", _SEPARATE, gains_plus_one=True),
    "gemma3": _Converted("gemma3_text", _SEPARATE, gains_plus_one=True),
    "starcoder2": _Converted("starcoder2", _SEPARATE),
    "phi3": _Converted("phi3", _FUSED),
    "gpt2": _Converted("gpt2", _OF_GPT2, prefix="transformer.h", keys=_KEYS_OF_GPT2, transposed=True),
}
#: The numbers of layers of the Gemmas whose scores are divided by the square root of d_model / heads, not of d_head.
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_]+)\.(weight|bias)")
_POSITIONS = {"position_embd.weight": "transformer.wpe.weight"}


class GgufFile(TensorFile):
    """A GGUF file, whose tensors are mapped from the disk and dequantised when they are read."""

    def __init__(self, place: Place) -> None:
        """Open the file; a remote file is copied to this machine first, and the copy is removed once it is open.

        Args:
            place: The place of the file.

        Raises:
            QkovError: The package gguf is not installed, the file is damaged, or its architecture is not read.
        """
        super().__init__(place.address)
        self._place, self._version = place, place.version()
        with place.local_copy() as path, named_input(place.address, "a GGUF file"):
            reader = _reader(str(path), place.address)
            metadata = {name: field.contents() for name, field in reader.fields.items() if _is_plain(name)}
            architecture = str(metadata.get("general.architecture"))
            if architecture not in _ARCHITECTURES:
                raise QkovError(
                    f"{place} holds the architecture {architecture!r} of GGUF; known are {', '.join(_ARCHITECTURES)}; "
                    f"save the model from which it was converted as safetensors, and read that"
                )
            self._converted = _ARCHITECTURES[architecture]
            self._stored = {self._name(tensor.name): tensor for tensor in reader.tensors}
            self.shapes = {name: self._shape(tensor) for name, tensor in self._stored.items()}
            self.config = self._config(metadata, architecture)
        self.config_origin = "the metadata of the GGUF file"
        self.metadata = {name: str(value) for name, value in metadata.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors by name, dequantised and in the order of transformers.

        Args:
            names: Names of the tensors.

        Raises:
            QkovError: A type of quantisation is not known, or the file was written again since it was opened.
        """
        self._place.demand_version(self._version)
        with named_input(self.address, "a GGUF file"):
            read = {name: self._values(name) for name in names}
        self._place.demand_version(self._version)
        return read

    def _name(self, stored: str) -> str:
        match = _LAYER_TENSOR.fullmatch(stored)
        if match is None or match[2] not in self._converted.names:
            return _POSITIONS.get(stored, stored)
        return f"{self._converted.prefix}.{match[1]}.{self._converted.names[match[2]]}.{match[3]}"

    def _shape(self, tensor: Any) -> tuple[int, ...]:
        # GGUF lists the fastest dimension first.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        return shape[::-1] if self._is_transposed(tensor.name) else shape

    def _is_transposed(self, stored: str) -> bool:
        return self._converted.transposed and re.search(r"attn_(qkv|output)\.weight$", stored) is not None

    def _values(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        stored = self._stored[name]
        shape = tuple(int(size) for size in reversed(stored.shape))
        values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).reshape(shape).copy())
        if self._is_transposed(stored.name):
            return values.T
        match = _LAYER_TENSOR.fullmatch(stored.name)
        if match is None:
            return values
        if self._converted.gains_plus_one and match[2].endswith("norm"):
            # In float64, so that adding 1 again gives back the stored number.
            return values.double() - 1
        if self._converted.permuted and match[2] in ("attn_q", "attn_k"):
            return _unpermuted(values, self._heads(match[2], int(match[1])))
        return values

    def _heads(self, kind: str, layer: int) -> int:
        config = self.config or {}
        queries = config.get("num_attention_heads")
        heads = queries if kind == "attn_q" else config.get("num_key_value_heads", queries)
        heads = heads[layer] if isinstance(heads, list) else heads
        if not isinstance(heads, int) or heads < 1:
            raise QkovError(f"{self.address} does not state the number of heads, by which its queries are permuted")
        return heads

    def _config(self, metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
        keys = self._converted.keys or _KEYS
        config = {
            key: value for name, key in keys.items() if (value := metadata.get(f"{architecture}.{name}")) is not None
        }
        if self._converted.model_type == "gpt2":
            return {"model_type": "gpt2"} | config
        key_value = config.get("num_key_value_heads")
        if isinstance(key_value, list):
            # The shapes of the layers show how many there are in each.
            config["num_key_value_heads"] = key_value[0] if len(set(key_value)) == 1 else None
        heads = config.get("num_attention_heads")
        if isinstance(heads, list) and len(set(heads)) == 1:
            config["num_attention_heads"] = heads[0]
        width = config.get("head_dim") or (config["hidden_size"] // heads if isinstance(heads, int) and heads else None)
        turning = metadata.get(f"{architecture}.rope.dimension_count", width)
        if turning != width and architecture != "phi3":
            raise QkovError(
                f"{self.address} says that {turning} of {width} dimensions of a head rotate, which is not known of "
                f"{architecture}; read the model from which it was converted"
            )
        if turning and width:
            config["partial_rotary_factor"] = turning / width
        if (layers := _WIDE_SCALE.get(architecture)) is not None:
            # The file does not state the scale of the scores; llama.cpp chooses it by the number of layers.
            is_wide = config.get("num_hidden_layers") == layers
            config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_wide else width
        return {"model_type": self._converted.model_type} | config | self._scaling(metadata, architecture)

    def _scaling(self, metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
        """Return the scaling of rotary positions as a config of transformers states it."""
        names = {name: f"{architecture}.rope.scaling.{name}" for name in ("type", "factor", "attn_factor")}
        kind, factor = metadata.get(names["type"]), metadata.get(names["factor"])
        divisors = next(
            (name for name in ("rope_freqs.weight", "rope_factors_short.weight") if name in self._stored), None
        )
        if divisors is not None:
            amplitude = metadata.get(names["attn_factor"], 1.0)
            listed = self._values(divisors).tolist()
            scaling = {"rope_type": "longrope", "short_factor": listed, "attention_factor": amplitude}
            return {"rope_scaling": scaling}
        if kind in (None, "none"):
            return {}
        length = metadata.get(f"{architecture}.rope.scaling.original_context_length")
        lengths = {} if length is None else {"original_max_position_embeddings": length}
        return {"rope_scaling": {"rope_type": kind, "factor": factor, **lengths}}


def _reader(path: str, address: str) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise QkovError(f"{address} is a GGUF file, which needs the package gguf: pip install 'qkov[gguf]'") from error
    return GGUFReader(path)


def _is_plain(name: str) -> bool:
    """Return whether an entry of the metadata is not one of the long lists of a tokeniser."""
    return not name.startswith(("tokenizer.", "GGUF."))


def _unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of each head in the order in which i and i + d_head/2 rotate together, not 2i and 2i + 1."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
