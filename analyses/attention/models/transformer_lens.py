"""Causal language models with TransformerLens' hooks, as the measures use them."""

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ....circuits.live.hooked_blocks import demand_known_interface
from ....circuits.live.models import open_model
from ....circuits.weights.attention_weights import AttentionWeights
from ..maps.evaluation import evaluation_mode
from .model import AttentionModel, InputSink, MapSink, last_token
from .model_maps import TRIAL_LENGTH, ModelMaps


class HookedModel(AttentionModel):
    """A causal language model whose maps are read at `blocks.{layer}.attn.hook_pattern`, and which is read at its end.

    The model runs in evaluation mode, without dropout, and gets its own mode back after every call. Tokens after a
    token that the mask hides move up by one position, as if it had been deleted; TransformerLens does it this way.
    """

    classifies = False
    causal = True

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model and run it on one sequence.

        Args:
            model: A model with `cfg`, `blocks` and `hooks`, as in TransformerLens 3 and 4.
            name: A name for reports; by default the model's name or class.
            mask_token: The id that stands for a removed token.

        Raises:
            CallError: The model has no such interface, it comes from a TransformerLens before 3.9, a token sees those
                after it, or the model gives no maps.
        """
        if not all(hasattr(model, part) for part in ("cfg", "blocks", "hooks")):
            raise CallError(
                f"expected a model with cfg, blocks and hooks as in TransformerLens, got {type(model).__name__}"
            )
        demand_known_interface(model)
        cfg = model.cfg
        self.name = name or getattr(cfg, "model_name", None) or type(model).__name__
        if getattr(cfg, "attention_dir", "causal") != "causal":
            raise CallError(
                f"a token of {self.name} sees those after it, and only causal language models are read through "
                f"TransformerLens' hooks; give the model of transformers inside it"
            )
        unbounded = getattr(cfg, "positional_embedding_type", None) == "alibi"
        self.context = None if unbounded else cfg.n_ctx
        tokenizer = getattr(model, "tokenizer", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.own_padding = isinstance(pad, int) and pad < cfg.d_vocab
        self.pad = pad if isinstance(pad, int) and self.own_padding else 0
        self.mask_token = mask_token if mask_token is not None else getattr(tokenizer, "mask_token_id", None)
        self._model = model
        tokens = torch.arange(TRIAL_LENGTH)[None] % cfg.d_vocab
        with evaluation_mode(model):
            self._maps = ModelMaps.by_trial(
                model, lambda: self._run(tokens, torch.ones_like(tokens, dtype=torch.bool)), self.name
            )
        self.layers, self.heads, self.layer_keys = self._maps.layers, self._maps.heads, self._maps.keys

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has embeddings of."""
        return self._model.cfg.d_vocab

    def logits(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
        token_types: Int[Tensor, "batch position"] | None = None,
    ) -> Float[Tensor, "batch *position output"]:
        """Run the model; see `AttentionModel`. Logits in half precision are returned as float32."""
        self.demand_tokens(tokens)
        self.demand_no_token_types(token_types)
        hooks = [] if embedded is None else [("hook_embed", lambda _value, **_hook: embedded)]
        reads = maps is not None or inputs is not None
        with (
            evaluation_mode(self._model),
            self._model.hooks(fwd_hooks=hooks),
            self._maps.handed_on(maps, inputs) if reads else nullcontext(),
        ):
            logits = self._run(tokens, mask)
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return what passes the hook of the token embedding.

        Raises:
            CallError: An id is not in the vocabulary, or a sequence is longer than the context.
            QkovError: The hook did not fire.
        """
        self.demand_tokens(tokens)
        seen: list[Tensor] = []
        with (
            evaluation_mode(self._model),
            self._model.hooks(fwd_hooks=[("hook_embed", lambda value, **_hook: seen.append(value))]),
        ):
            self._model(tokens.to(self._device), return_type=None, stop_at_layer=0)
        if not seen:
            raise QkovError(f"the hook of the token embedding of {self.name} (hook_embed) did not fire")
        return seen[0]

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the last token of each example."""
        return last_token(mask)

    def attention_weights(self) -> list[AttentionWeights]:
        """Return the weights of every layer, in the basis that the model was loaded in."""
        return list(open_model(self._model).layers())

    def _run(self, tokens: Tensor, mask: Tensor) -> Float[Tensor, "batch position output"]:
        return self._model(tokens.to(self._device), return_type="logits", attention_mask=mask.long().to(self._device))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device
