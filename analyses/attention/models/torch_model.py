"""Models made of torch's own attention, torch.nn.MultiheadAttention, as the measures use them."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ....circuits.errors import CallError, QkovError
from ....circuits.live.models import open_model
from ....circuits.weights.attention_weights import AttentionWeights
from ..maps.evaluation import evaluation_mode
from .model import AttentionModel, InputSink, MapSink, last_token
from .model_maps import TRIAL_LENGTH, ModelMaps
from .readout import as_float, queries_read

#: The names that a padding mask may have in the model's forward: true on tokens, or true on padding.
_TOKEN_MASKS = ("attention_mask",)
_PADDING_MASKS = ("key_padding_mask", "src_key_padding_mask", "padding_mask")
_TOKEN_TYPES = "token_type_ids"
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class TorchModel(AttentionModel):
    """A module that attends by torch.nn.MultiheadAttention, takes token ids [batch, position] and returns logits.

    A mask is passed on if the forward takes `attention_mask`, true on tokens, or `key_padding_mask`,
    `src_key_padding_mask` or `padding_mask`, true on padding. Without one, only batches without padding can be run.
    Token types are passed on if the forward takes `token_type_ids`. The model runs in evaluation mode, without dropout,
    and gets its own mode back after every call.
    """

    context = None
    pad = 0
    own_padding = False

    def __init__(
        self,
        model: nn.Module,
        kind: Literal["classifier", "causal"],
        *,
        name: str | None = None,
        mask_token: int | None = None,
    ) -> None:
        """Take a model and run it on one sequence, which shows its token embedding and its attention.

        Args:
            model: The model; it returns logits as a tensor, or in the attribute `logits`.
            kind: "classifier" for logits [batch, class], "causal" for logits [batch, position, vocabulary].
            name: A name for reports; by default the model's class.
            mask_token: The id that stands for a removed token.

        Raises:
            CallError: The forward needs more than token ids, no nn.Embedding reads them, the model gives no attention
                maps, its logits have another shape, or a token of a causal model sees those after it.
        """
        self.name = name or type(model).__name__
        self.classifies = kind == "classifier"
        self.mask_token = mask_token
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        needed = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
        if len([key for key in needed if parameters[key].kind not in _VARIABLE]) > 1:
            raise CallError(
                f"the forward of {self.name} takes other arguments than token ids ({', '.join(needed)}); expected one "
                f"that takes token ids and, if there is padding, a mask"
            )
        self.takes_token_types = _TOKEN_TYPES in parameters
        self._mask_name = next((key for key in (*_TOKEN_MASKS, *_PADDING_MASKS) if key in parameters), None)
        tokens = torch.arange(TRIAL_LENGTH)[None].flip(1)
        shown = torch.ones_like(tokens, dtype=torch.bool)
        self._embedding = self._find_embedding(tokens, shown)
        with evaluation_mode(model):
            self._maps = ModelMaps.by_trial(model, lambda: self._run(tokens, shown), self.name)
        self.layers, self.heads, self.causal = self._maps.layers, self._maps.heads, self._maps.demand_causal()
        self.layer_keys = self._maps.keys
        if not (self.causal or self.classifies):
            raise CallError(
                f"a token of {self.name} sees those after it, so it does not predict the next one; expected a causal "
                f"mask in its attention"
            )
        self._read = queries_read(self, tokens) if self.classifies else [TRIAL_LENGTH - 1]

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
        """Run the model; see `AttentionModel`. Logits in half precision are returned as float32.

        Raises:
            CallError: There is padding, and the model takes no mask; or there are token types, and it takes none.
        """
        if not self.takes_token_types:
            self.demand_no_token_types(token_types)
        reads = maps is not None or inputs is not None
        with (
            evaluation_mode(self._model),
            self._embedding_replaced(embedded),
            self._maps.handed_on(maps, inputs) if reads else nullcontext(),
        ):
            return self._run(tokens, mask, token_types)

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return the token embeddings."""
        return self._embedding(tokens.to(self._embedding.weight.device))

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the first or the last token of each example, whichever the outputs depend on."""
        if self._read == [TRIAL_LENGTH - 1]:
            return last_token(mask)
        if self._read == [0]:
            return torch.zeros(len(mask), dtype=torch.long)
        raise CallError(
            f"{self.name} reads its prediction off several positions, or none, so that no single row of attention "
            f"belongs to it; expected a classifier that reads at its first or last token"
        )

    def attention_weights(self) -> list[AttentionWeights]:
        """Return the raw weights of every layer.

        Raises:
            QkovError: The weights cannot be read, or there are more or fewer layers of them than attention maps.
        """
        weights = list(open_model(self._model).layers())
        if len(weights) != self.layers:
            raise QkovError(f"{self.name} gives {self.layers} attention maps and has weights for {len(weights)} layers")
        return weights

    def _run(
        self, tokens: Tensor, mask: Tensor, token_types: Tensor | None = None
    ) -> Float[Tensor, "batch *position output"]:
        device = next(self._model.parameters()).device
        options = {} if token_types is None else {_TOKEN_TYPES: token_types.to(device)}
        if self._mask_name is not None:
            options[self._mask_name] = (mask if self._mask_name in _TOKEN_MASKS else ~mask).to(device)
        elif not bool(mask.all()):
            raise CallError(
                f"the forward of {self.name} takes no mask ({', '.join((*_TOKEN_MASKS, *_PADDING_MASKS))}), so padding "
                f"and hidden tokens would be seen; add one, or give sequences of one length"
            )
        output: Any = self._model(tokens.to(device), **options)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        expected = "[batch, class]" if self.classifies else "[batch, position, vocabulary]"
        if not isinstance(logits, Tensor) or logits.ndim != (2 if self.classifies else 3) or logits.shape[-1] < 2:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            raise CallError(f"{self.name} returned {shape}; expected logits {expected} with two or more outputs")
        return as_float(logits)

    def _find_embedding(self, tokens: Tensor, mask: Tensor) -> nn.Embedding:
        """Return the module that turns token ids into vectors: the first nn.Embedding called with just these ids."""
        found: list[nn.Embedding] = []

        def look(module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
            if isinstance(module, nn.Embedding) and args and torch.equal(args[0].cpu(), tokens):
                found.append(module)

        embeddings = [module for module in self._model.modules() if isinstance(module, nn.Embedding)]
        handles = [module.register_forward_hook(look) for module in embeddings]
        try:
            with torch.no_grad(), evaluation_mode(self._model):
                self._run(tokens, mask)
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            raise CallError(f"no nn.Embedding of {self.name} is called with the token ids; expected one that is")
        return found[0]

    @contextmanager
    def _embedding_replaced(self, embedded: Tensor | None) -> Iterator[None]:
        if embedded is None:
            yield
            return
        handle = self._embedding.register_forward_hook(lambda _module, _args, _output: embedded)
        try:
            yield
        finally:
            handle.remove()
