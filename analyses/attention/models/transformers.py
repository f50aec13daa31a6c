"""Models of transformers, as the measures use them: sequence classifiers, causal and masked language models."""

import inspect
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ....circuits.errors import CallError, QkovError
from ....circuits.live.models import open_model
from ....circuits.weights.attention_weights import AttentionWeights
from ..maps.evaluation import eager_attention, evaluation_mode
from .model import AttentionModel, Batch, InputSink, MapSink, last_token
from .model_maps import TRIAL_LENGTH, ModelMaps, demand_one_stack
from .own_function import demand_own_function
from .readout import as_float, queries_read


class TransformersModel(AttentionModel):
    """The common part of the three kinds of models of transformers.

    The model runs in evaluation mode, without dropout, and with eager attention. Both are set for each call alone:
    between calls the model is in the mode, and has the attention implementation, that its owner gave it.

    Tokens that the mask hides keep their positions; those after them do not move up.
    """

    classifies = False

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model and run it on one sequence, which shows where its attention is and whether it is causal.

        Args:
            model: A model of transformers, or one with its interface.
            name: A name for reports; by default the model's address or class.
            mask_token: The id that stands for a removed token, which the tokenizer knows and the config does not.

        Raises:
            CallError: The model has an encoder and a decoder, or gives no attention maps.
        """
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        demand_text(model, self.name)
        if getattr(model.config, "is_encoder_decoder", False):
            demand_one_stack({"encoder", "decoder"}, self.name)
        self._model = model
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        pad = getattr(config, "pad_token_id", None)
        self.own_padding = isinstance(pad, int) and 0 <= pad < self.vocabulary
        self.pad = int(pad) if self.own_padding and pad is not None else 0
        self.mask_token = mask_token
        self.context = _context(model, config)
        self.takes_token_types = "token_type_ids" in inspect.signature(model.forward).parameters
        types = getattr(config, "type_vocab_size", None)
        # Models without a table of token types either ignore them or look them up in the vocabulary.
        self._types = types if isinstance(types, int) and types > 0 else None
        tokens = torch.arange(TRIAL_LENGTH, device=self.device)[None] % self.vocabulary
        shown = torch.ones_like(tokens, dtype=torch.bool)
        with self._as_measured() as options:
            if options:
                self._demand_same_logits(tokens, options)
            self._maps = ModelMaps.by_trial(model, lambda: self._run(tokens, shown, options, None), self.name)
        self.layers, self.heads, self.causal = self._maps.layers, self._maps.heads, self._maps.demand_causal()
        self.layer_keys = self._maps.keys
        is_half = model.get_input_embeddings().weight.dtype in (torch.float16, torch.bfloat16)
        demand_own_function(
            self,
            self._own_logits,
            self._plain_tokens(config),
            padded=self._reads_padding_as_masked,
            types=min(self._types or 2, 2) if self.takes_token_types else 0,
            rounding=3e-2 if is_half else 1e-4,
        )

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has embeddings of."""
        return self._model.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self._model.get_input_embeddings().weight.device

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
        self._demand_token_types(token_types)
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        token_types = None if token_types is None else token_types.to(self.device)
        reads = maps is not None or inputs is not None
        with self._as_measured() as options, self._embedding_replaced(embedded, token_types):
            if not reads:
                return self._run(tokens, mask, {}, token_types)
            with self._maps.handed_on(maps, inputs):
                return self._run(tokens, mask, options, token_types)

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return the token embeddings.

        Raises:
            CallError: An id is not in the vocabulary, or a sequence is longer than the context.
        """
        self.demand_tokens(tokens)
        with self._as_measured():
            return self._model.get_input_embeddings()(tokens.to(self.device))

    def attention_weights(self) -> list[AttentionWeights]:
        """Return the raw weights of every layer; weights that several layers share are repeated.

        Raises:
            QkovError: The weights cannot be read, or there are more or fewer layers of them than attention maps.
        """
        by_layer = [weights for weights in open_model(self._model).layers() for _ in range(weights.facts.used_by)]
        if len(by_layer) != self.layers:
            raise QkovError(
                f"{self.name} gives {self.layers} attention maps and has weights for {len(by_layer)} layers"
            )
        return by_layer

    @contextmanager
    def _as_measured(self) -> Iterator[dict[str, bool]]:
        """Run the model without dropout and with maps, and leave it as it was.

        Yields:
            The options to call the model with for maps. Some models cannot be set to eager attention once they are
            built, but compute their maps, with the masks that these need, in a call with output_attentions.
        """
        with evaluation_mode(self._model), eager_attention(self._model) as fused:
            yield {"output_attentions": True} if fused else {}

    def _demand_same_logits(self, tokens: Tensor, options: dict[str, bool]) -> None:
        """Refuse a model that computes something else when it is asked for its maps, such as without its masks."""
        for length in (tokens.shape[1], tokens.shape[1] - 1):
            mask = torch.arange(tokens.shape[1], device=tokens.device)[None] < length
            with torch.no_grad():
                fused, plain = (self._run(tokens, mask, chosen, None) for chosen in ({}, options))
            if fused.ndim == 3:
                fused, plain = fused[mask], plain[mask]
            if not torch.allclose(fused, plain, rtol=1e-2, atol=1e-2 * float(fused.abs().max())):
                kind = self._model.config._attn_implementation
                raise CallError(
                    f"the attention of {self.name} is {kind} and cannot be changed, and fused attention gives no maps; "
                    f"load the model again with attn_implementation='eager'"
                )

    @abstractmethod
    def _run(
        self, tokens: Tensor, mask: Tensor, options: dict[str, bool], token_types: Tensor | None
    ) -> Float[Tensor, "batch *position output"]:
        """Call the model."""

    def _own_logits(self, tokens: Tensor, mask: Tensor, token_types: Tensor | None) -> Tensor:
        """Return the logits of a call of the model as its owner makes it."""
        with evaluation_mode(self._model):
            return as_float(self._model(**_arguments(tokens, mask, token_types)).logits)

    def _demand_token_types(self, token_types: Tensor | None) -> None:
        """Refuse token types that the model does not take, or has no embedding for."""
        if not self.takes_token_types:
            self.demand_no_token_types(token_types)
        types = self._types or self.vocabulary
        if token_types is not None and not 0 <= int(token_types.min()) <= int(token_types.max()) < types:
            raise CallError(
                f"{self.name} has {types} token types, from 0, got {int(token_types.min())} to "
                f"{int(token_types.max())}; give the types of its own tokenizer"
            )

    @contextmanager
    def _embedding_replaced(self, embedded: Tensor | None, token_types: Tensor | None) -> Iterator[None]:
        """Let the model go on with other embeddings of its tokens.

        The model is called with the ids, since some models do with ids what they leave out when they are called with
        embeddings. Some look up their token types in the same table, after the tokens; those are left alone.

        Raises:
            CallError: The model does not embed each token once by the module that it names.
        """
        if embedded is None:
            yield
            return
        shapes: list[torch.Size] = []

        def replace(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if shapes and token_types is not None and args and torch.equal(args[0], token_types):
                return output
            shapes.append(output.shape)
            return embedded.to(output.device)

        handle = self._model.get_input_embeddings().register_forward_hook(replace)
        try:
            yield
        finally:
            handle.remove()
        if shapes != [embedded.shape]:
            raise CallError(
                f"{self.name} calls its token embedding {len(shapes)} times for a batch; expected once, for vectors of "
                f"shape {list(embedded.shape)}"
            )

    @property
    def _reads_padding_as_masked(self) -> bool:
        """Whether the model itself takes what the mask hides for padding, wherever it reads its prediction."""
        return True

    def _plain_tokens(self, config: Any) -> Int[Tensor, "1 position"]:
        """Return a sequence of tokens without special ones, as far as the vocabulary has others."""
        stated = [value for key, value in config.to_dict().items() if key.endswith("token_id")]
        special = {value for each in stated for value in (each if isinstance(each, list) else [each])}
        special |= {self.mask_token, self.pad}
        plain = [token for token in range(self.vocabulary) if token not in special][-TRIAL_LENGTH:]
        return torch.tensor([(plain or [0]) * TRIAL_LENGTH], device=self.device)[:, :TRIAL_LENGTH]


class TransformersClassifier(TransformersModel):
    """A sequence classifier: an encoder is read where a trial run shows, a decoder at its last token.

    The mask shows which token is a decoder's last. Comparing ids with that of the padding would not do, since another
    token may have the same id.
    """

    classifies = True

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model; see `TransformersModel`.

        Raises:
            CallError: As there, or the model's outputs are not classes of the sequence.
        """
        super().__init__(model, name=name, mask_token=mask_token)
        if getattr(model.config, "problem_type", None) == "multi_label_classification":
            raise CallError(
                f"the labels of {self.name} do not exclude each other; expected a model with one right class"
            )
        self._first = not self.causal and self._reads_first()
        names = getattr(model.config, "id2label", None) or {}
        self.class_names = tuple(str(names[number]) for number in range(len(names)) if number in names)

    @property
    def _reads_padding_as_masked(self) -> bool:
        # A decoder finds its last token by the id of the padding.
        return self.own_padding or getattr(self._model, "score", None) is None

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the position at which the prediction for each example is read."""
        if self.causal:
            return last_token(mask)
        if not self._first:
            raise CallError(
                f"{self.name} reads its prediction off several positions, or none, so that no single row of attention "
                f"belongs to it; expected a classifier that reads at its first token"
            )
        return torch.zeros(len(mask), dtype=torch.long)

    def _run(
        self, tokens: Tensor, mask: Tensor, options: dict[str, bool], token_types: Tensor | None
    ) -> Float[Tensor, "batch *position output"]:
        arguments = _arguments(tokens, mask, token_types) | options
        head = getattr(self._model, "score", None)
        if head is None:
            logits = as_float(self._model(**arguments).logits)
        else:
            hidden = self._model.base_model(**arguments, use_cache=False).last_hidden_state
            logits = as_float(head(hidden[torch.arange(len(mask), device=mask.device), last_token(mask)]))
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise CallError(
                f"{self.name} gives outputs of shape {list(logits.shape)}; expected [batch, class], two or more classes"
            )
        return logits

    def _reads_first(self) -> bool:
        """Return whether the first query's row is the only one of the last map that the outputs depend on."""
        return queries_read(self, torch.arange(TRIAL_LENGTH)[None] % self.vocabulary) == [0]


class _LanguageModel(TransformersModel):
    def logits_at(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        positions: Int[Tensor, "batch asked"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
        token_types: Int[Tensor, "batch position"] | None = None,
    ) -> Float[Tensor, "batch asked vocabulary"]:
        """Return the logits at some positions; the other positions never reach the unembedding."""
        unembedding = self._model.get_output_embeddings()
        if not isinstance(unembedding, nn.Module):
            return super().logits_at(
                tokens, mask, positions, maps=maps, inputs=inputs, embedded=embedded, token_types=token_types
            )

        def keep_positions(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, *others = args
            at = positions.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
            return hidden.gather(1, at), *others

        handle = unembedding.register_forward_pre_hook(keep_positions)
        try:
            return self.logits(tokens, mask, maps=maps, inputs=inputs, embedded=embedded, token_types=token_types)
        finally:
            handle.remove()


class TransformersCausalLM(_LanguageModel):
    """A causal language model, read at its last token."""

    def __init__(self, model: Any, *, name: str | None = None, mask_token: int | None = None) -> None:
        """Take a model; see `TransformersModel`.

        Raises:
            CallError: As there, or a token sees those after it.
        """
        super().__init__(model, name=name, mask_token=mask_token)
        if not self.causal:
            raise CallError(
                f"a token of {self.name} sees those after it, so it does not predict the next one; load it as a "
                f"masked language model, or set is_decoder in its config"
            )

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the last token of each example."""
        return last_token(mask)

    def _run(
        self, tokens: Tensor, mask: Tensor, options: dict[str, bool], token_types: Tensor | None
    ) -> Float[Tensor, "batch *position output"]:
        return as_float(self._model(**_arguments(tokens, mask, token_types), **options, use_cache=False).logits)


class TransformersMaskedLM(_LanguageModel):
    """A masked language model, read at its mask token."""

    def __init__(self, model: Any, *, mask_token: int, name: str | None = None) -> None:
        """Take a model; see `TransformersModel`."""
        super().__init__(model, name=name, mask_token=mask_token)

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Refuse, since the mask does not say where the mask token is.

        Raises:
            CallError: Always.
        """
        raise CallError(
            f"{self.name} is read at its mask token, whose position follows from the tokens and not from the mask of "
            f"{len(mask)} examples; call reading_positions(batch)"
        )

    def reading_positions(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Return the position of each example's mask token: the special one, where removed tokens were masked too.

        Raises:
            CallError: An example has no mask token, or several of which not exactly one is special.
        """
        positions = []
        for number, example in enumerate(batch.examples):
            masked = [position for position, token in enumerate(example.tokens) if token == self.mask_token]
            special = [position for position in masked if example.is_special[position]]
            candidates = special or masked
            if len(candidates) != 1:
                raise CallError(
                    f"example {example.id or number} has {len(candidates)} mask tokens (id {self.mask_token}); "
                    f"{self.name} is read at one, which has to be marked special if there are others"
                )
            positions.append(candidates[0])
        return torch.tensor(positions)

    def _run(
        self, tokens: Tensor, mask: Tensor, options: dict[str, bool], token_types: Tensor | None
    ) -> Float[Tensor, "batch *position output"]:
        return as_float(self._model(**_arguments(tokens, mask, token_types), **options).logits)


def demand_text(model: Any, name: str) -> None:
    """Refuse a model of transformers that reads something else than token ids.

    Args:
        model: The model.
        name: The model's name, for the message.

    Raises:
        CallError: It reads images, sound or the like.
    """
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise CallError(f"{name} reads {reads}, not token ids; explain takes models of text")


def _arguments(tokens: Tensor, mask: Tensor, token_types: Tensor | None) -> dict[str, Tensor]:
    types = {} if token_types is None else {"token_type_ids": token_types}
    return {"input_ids": tokens, "attention_mask": mask.long(), **types}


def _context(model: nn.Module, config: Any) -> int | None:
    """Return the longest sequence; RoBERTa and similar models reserve the first rows of their table for padding."""
    longest = next((getattr(config, key) for key in _CONTEXT_KEYS if getattr(config, key, None)), None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return longest


_CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
