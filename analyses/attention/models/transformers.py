"""Models of transformers as the measures see them: sequence classifiers, causal and masked language models."""

import warnings
from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ....circuits.errors import CallError, QkovError
from ....circuits.live.models import open_model
from ....circuits.weights.attention_weights import AttentionWeights
from .attention_hooks import find_attention
from .model import AttentionModel, Batch, InputSink, MapSink, last_token

#: Length of the sequence that a model is tried on.
_TRIED = 5


class TransformersModel(AttentionModel):
    """What the three kinds share. The model is put into evaluation mode and its attention set to eager.

    Tokens that the mask hides keep their positions: those behind them do not move up.
    """

    classifies = False

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model and try it on one sequence, which tells where its attention is and whether it is causal.

        Args:
            model: of transformers, or with its interface.
            name: for reports; the model's address or class if not given.
            mask_token: id that stands for a removed token; a config does not tell it, its tokeniser does.

        Raises:
            CallError: it has an encoder and a decoder, or gives no attention maps.
        """
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise CallError(
                f"{self.name} has an encoder and a decoder, so its attention maps are of three kinds and no single row "
                f"of them leads from the prediction to the input; give a model with one stack"
            )
        _demand_eager(model, self.name)
        self._model = model.eval()
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        pad = getattr(config, "pad_token_id", None)
        self.own_padding = isinstance(pad, int) and 0 <= pad < self._vocabulary
        self.pad = int(pad) if self.own_padding and pad is not None else 0
        self.mask_token = mask_token
        self.context = _context(model, config)
        tried = torch.arange(_TRIED, device=self.device)[None] % self._vocabulary
        seen = torch.ones_like(tried, dtype=torch.bool)
        self._attention = find_attention(model, lambda options: self._run(tried, seen, None, options), self.name)
        self.layers, self.heads, self.causal = self._attention.layers, self._attention.heads, self._attention.causal

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._model.get_input_embeddings().weight.device

    def logits(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
    ) -> Float[Tensor, "batch *position output"]:
        """Run the model; see `AttentionModel`. Half precision comes back as float32."""
        self.demand_context(tokens)
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        if maps is None and inputs is None:
            return self._run(tokens, mask, embedded, {})
        with self._attention.hooked(maps, inputs):
            return self._run(tokens, mask, embedded, self._attention.options if maps else {})

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return the token embeddings."""
        return self._model.get_input_embeddings()(tokens.to(self.device))

    def attention_weights(self) -> list[AttentionWeights]:
        """Return the weights of every layer, raw; a layer that stands for several is repeated.

        Raises:
            QkovError: the weights cannot be read, or are of another number of layers than the maps.
        """
        found = [weights for weights in open_model(self._model).layers() for _ in range(weights.facts.used_by)]
        if len(found) != self.layers:
            raise QkovError(f"{self.name} gives {self.layers} attention maps and has weights for {len(found)} layers")
        return found

    @abstractmethod
    def _run(
        self, tokens: Tensor, mask: Tensor, embedded: Tensor | None, options: dict[str, bool]
    ) -> Float[Tensor, "batch *position output"]:
        """Call the model."""

    def _given(self, tokens: Tensor, mask: Tensor, embedded: Tensor | None) -> dict[str, Tensor]:
        words = {"input_ids": tokens} if embedded is None else {"inputs_embeds": embedded.to(self.device)}
        return words | {"attention_mask": mask.long()}


class TransformersClassifier(TransformersModel):
    """A sequence classifier; encoders are read where a trial shows, decoders at their last token.

    A decoder's last token is told by the mask, not by comparing ids with the padding's, which another token may share.
    """

    classifies = True

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model; see `TransformersModel`.

        Raises:
            CallError: as there, or its outputs are not classes of the sequence.
        """
        super().__init__(model, name=name, mask_token=mask_token)
        if getattr(model.config, "problem_type", None) == "multi_label_classification":
            raise CallError(
                f"the labels of {self.name} do not exclude each other; expected a model with one right class"
            )
        self._first = not self.causal and self._reads_first()

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the position at which each example's prediction is read."""
        if self.causal:
            return last_token(mask)
        if not self._first:
            raise CallError(
                f"{self.name} reads its prediction off several positions, or none, so that no single row of attention "
                f"belongs to it; expected a classifier that reads at its first token"
            )
        return torch.zeros(len(mask), dtype=torch.long)

    def _run(
        self, tokens: Tensor, mask: Tensor, embedded: Tensor | None, options: dict[str, bool]
    ) -> Float[Tensor, "batch *position output"]:
        given = self._given(tokens, mask, embedded)
        head = getattr(self._model, "score", None)
        if head is None:
            logits = _as_float(self._model(**given, **options).logits)
        else:
            hidden = self._model.base_model(**given, **options, use_cache=False).last_hidden_state
            logits = _as_float(head(hidden[torch.arange(len(mask), device=mask.device), last_token(mask)]))
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise CallError(
                f"{self.name} gives outputs of shape {list(logits.shape)}; expected [batch, class], two or more classes"
            )
        return logits

    def _reads_first(self) -> bool:
        """Whether of the last map only the first query's row moves the outputs."""
        tried = torch.arange(_TRIED)[None] % self._vocabulary
        last: list[Tensor] = []

        def keep(_layer: int, given: Tensor) -> None:
            last[:] = [given]

        with torch.enable_grad():
            embedded = self.embed(tried).detach().requires_grad_()
            logits = self.logits(tried, torch.ones_like(tried, dtype=torch.bool), maps=keep, embedded=embedded)
            (gradient,) = torch.autograd.grad(logits[0, 0], last)
        return gradient.abs().sum(dim=(0, 1, 3)).nonzero().flatten().tolist() == [0]


class _LanguageModel(TransformersModel):
    def logits_at(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        places: Int[Tensor, "batch place"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
    ) -> Float[Tensor, "batch place vocabulary"]:
        """Return the logits at some positions; the others never reach the matrix that leads to the vocabulary."""
        unembedding = self._model.get_output_embeddings()
        if not isinstance(unembedding, nn.Module):
            return super().logits_at(tokens, mask, places, maps=maps, inputs=inputs, embedded=embedded)

        def keep_places(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, *others = args
            at = places.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
            return hidden.gather(1, at), *others

        handle = unembedding.register_forward_pre_hook(keep_places)
        try:
            return self.logits(tokens, mask, maps=maps, inputs=inputs, embedded=embedded)
        finally:
            handle.remove()


class TransformersCausalLM(_LanguageModel):
    """A causal language model, read at its last token."""

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model; see `TransformersModel`.

        Raises:
            CallError: as there, or a token sees those behind it.
        """
        super().__init__(model, name=name, mask_token=mask_token)
        if not self.causal:
            raise CallError(
                f"a token of {self.name} sees those behind it, so it does not predict the next one; load it as a "
                f"masked language model, or set is_decoder in its config"
            )

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the last token of each example."""
        return last_token(mask)

    def _run(
        self, tokens: Tensor, mask: Tensor, embedded: Tensor | None, options: dict[str, bool]
    ) -> Float[Tensor, "batch *position output"]:
        return _as_float(self._model(**self._given(tokens, mask, embedded), **options, use_cache=False).logits)


class TransformersMaskedLM(_LanguageModel):
    """A masked language model, read at its mask token."""

    def __init__(self, model: Any, *, mask_token: int, name: str | None = None) -> None:
        """Take a model; see `TransformersModel`."""
        super().__init__(model, name=name, mask_token=mask_token)

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Refuse: the mask does not say where the mask token is."""
        raise CallError(
            f"{self.name} is read at its mask token, which the tokens tell and the mask of {len(mask)} examples does "
            f"not: ask reading_positions(batch)"
        )

    def reading_positions(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Return where each example's mask token is: the special one, where removed tokens were masked too.

        Raises:
            CallError: an example has none, or several and not one of them special.
        """
        places = []
        for number, example in enumerate(batch.examples):
            masked = [place for place, token in enumerate(example.tokens) if token == self.mask_token]
            special = [place for place in masked if example.is_special[place]]
            found = special or masked
            if len(found) != 1:
                raise CallError(
                    f"example {example.id or number} has {len(found)} mask tokens (id {self.mask_token}); {self.name} "
                    f"is read at one, which is marked special where there are others"
                )
            places.append(found[0])
        return torch.tensor(places)

    def _run(
        self, tokens: Tensor, mask: Tensor, embedded: Tensor | None, options: dict[str, bool]
    ) -> Float[Tensor, "batch *position output"]:
        return _as_float(self._model(**self._given(tokens, mask, embedded), **options).logits)


def _demand_eager(model: Any, name: str) -> None:
    """Set the attention to eager; some models cannot be changed once they are made."""
    kind = getattr(model.config, "_attn_implementation", None)
    if kind not in (None, "eager") and hasattr(model, "set_attn_implementation"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.set_attn_implementation("eager")
        kind = model.config._attn_implementation
    if kind not in (None, "eager"):
        raise CallError(
            f"the attention of {name} is {kind} and cannot be changed, and fused attention gives no maps; load the "
            f"model again with attn_implementation='eager'"
        )


def _as_float(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _context(model: nn.Module, config: Any) -> int | None:
    """The longest sequence; RoBERTa and its kin keep the first rows of their table for padding."""
    longest = next((getattr(config, key) for key in _CONTEXT_KEYS if getattr(config, key, None)), None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return longest


_CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
