"""Causal language models with TransformerLens' hooks as the measures see them: HookedTransformer, TransformerBridge."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ....circuits.live.models import open_model
from ....circuits.weights.attention_weights import AttentionWeights
from .model import AttentionModel, InputSink, MapSink, last_token

_PATTERN = "blocks.{layer}.attn.hook_pattern"
#: What the modules call that which their attention reads, from version to version.
_READ = ("hidden_states", "value_input")


class HookedModel(AttentionModel):
    """A causal language model whose maps are taken at `blocks.{layer}.attn.hook_pattern`, read at its last token.

    Behind a token that the mask hides, as in front of one that was deleted, positions move up: so TransformerLens has
    it.
    """

    classifies = False
    causal = True

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model.

        Args:
            model: with `cfg`, `blocks` and `hooks`, as in TransformerLens 3 and 4.
            name: for reports; the model's name or class if not given.
            mask_token: id that stands for a removed token.

        Raises:
            CallError: it has no such interface, or a token sees those behind it.
        """
        if not all(hasattr(model, part) for part in ("cfg", "blocks", "hooks")):
            raise CallError(
                f"expected a model with cfg, blocks and hooks as in TransformerLens, got {type(model).__name__}"
            )
        cfg = model.cfg
        self.name = name or getattr(cfg, "model_name", None) or type(model).__name__
        if getattr(cfg, "attention_dir", "causal") != "causal":
            raise CallError(
                f"a token of {self.name} sees those behind it, and only causal language models are read through "
                f"TransformerLens' hooks; give the model of transformers inside it"
            )
        self.layers, self.heads = len(model.blocks), cfg.n_heads
        unbounded = getattr(cfg, "positional_embedding_type", None) == "alibi"
        self.context = None if unbounded else cfg.n_ctx
        tokenizer = getattr(model, "tokenizer", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.own_padding = isinstance(pad, int) and pad < cfg.d_vocab
        self.pad = pad if isinstance(pad, int) and self.own_padding else 0
        self.mask_token = mask_token if mask_token is not None else getattr(tokenizer, "mask_token_id", None)
        self._model = model.eval()

    def logits(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
    ) -> Float[Tensor, "batch *position output"]:
        """Run the model; see `AttentionModel`."""
        self.demand_context(tokens)
        given: set[int] = set()
        hooks: list[tuple[str, Any]] = []
        if embedded is not None:
            hooks.append(("hook_embed", lambda _value, **_hook: embedded))
        if maps is not None:
            hooks += [(_PATTERN.format(layer=layer), _hand_on(layer, maps, given)) for layer in range(self.layers)]
        handles = []
        if inputs is not None:
            handles = [
                block.attn.register_forward_pre_hook(_hand_on_input(layer, inputs), with_kwargs=True)
                for layer, block in enumerate(self._model.blocks)
            ]
        try:
            with self._model.hooks(fwd_hooks=hooks):
                logits = self._model(
                    tokens.to(self._device), return_type="logits", attention_mask=mask.long().to(self._device)
                )
        finally:
            for handle in handles:
                handle.remove()
        missing = set(range(self.layers)) - given
        if maps is not None and missing:
            raise CallError(
                f"layer {min(missing)} of {self.name} gave no attention map: its hook_pattern did not fire; load the "
                f"model with eager attention"
            )
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return what the hook of the token embedding sees."""
        seen: list[Tensor] = []
        with self._model.hooks(fwd_hooks=[("hook_embed", lambda value, **_hook: seen.append(value))]):
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

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _hand_on(layer: int, maps: MapSink, given: set[int]) -> Any:
    def hook(value: Tensor, **_hook: Any) -> None:
        given.add(layer)
        maps(layer, value)

    return hook


def _hand_on_input(layer: int, inputs: InputSink) -> Any:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs(layer, args[0] if args else next(kwargs[key] for key in _READ if key in kwargs))

    return hook
