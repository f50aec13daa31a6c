"""This project's single-layer attention model, as the measures use it: ids of a small vocabulary in, classes out."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ....circuits.reading.checkpoint import open_checkpoint
from ....circuits.reading.saved_format import is_own, own_settings
from ....circuits.weights.attention_weights import AttentionWeights
from ...dynamics.model import SingleLayerAttention
from ...dynamics.populations import exact_population
from ...dynamics.setting import Parameterization, Setting
from .model import AttentionModel, InputSink, MapSink, last_token


class SingleLayerModel(AttentionModel):
    """One run of a `SingleLayerAttention` over a vocabulary with known vectors, read at the last token.

    Only the last token has a query, and its row of the map is the layer's attention. The layer has no residual stream,
    and the attention of the other tokens is not computed; their rows are those of the identity, so that rollout leaves
    these tokens as they are.
    """

    layers = 1
    layer_keys = (("", 0),)
    causal = True
    context = None
    residual_stream = False
    pad = 0
    own_padding = False
    mask_token = None
    classifies = True

    def __init__(
        self,
        model: SingleLayerAttention,
        embedding: Float[Tensor, "token d_model"],
        *,
        run: int = 0,
        query_among_keys: bool = True,
        name: str = "single-layer attention",
    ) -> None:
        """Take a run of a model.

        Args:
            model: A model with any number of runs.
            embedding: The vector of each token id.
            run: The number of the run.
            query_among_keys: Whether the last token is attended to as well, as in the 50-token task; in the paper's
                population it is not.
            name: A name for reports.

        Raises:
            CallError: The vectors have another width than the model, or there is no such run.
        """
        width = model.get_parameter(model.attention_names[0]).shape[2]
        if embedding.shape[1] != width:
            raise CallError(
                f"the model has width {width}, and the vectors of its tokens have width {embedding.shape[1]}"
            )
        if not 0 <= run < model.runs:
            raise CallError(f"the model has runs 0 to {model.runs - 1}, got run {run}")
        self.name = name
        self.heads = model.heads
        self._model, self._run, self._query_among_keys = model, run, query_among_keys
        self._embedding = embedding.to(next(model.parameters()))

    @classmethod
    def open(cls, address: Path | str) -> "SingleLayerModel":
        """Open a checkpoint that `qkov reproduce` saved; the setting stored in it determines the vocabulary.

        Raises:
            QkovError: It is not such a checkpoint, or it is damaged.
        """
        opened = open_checkpoint(address)
        if not is_own(opened.file):
            raise QkovError(
                f"{opened.file.address} is not a checkpoint that qkov saved; expected one of qkov reproduce"
            )
        settings = own_settings(opened.file)
        try:
            setting = Setting(**settings["setting"])
            parameterization = Parameterization.parse(settings["parameterization"])
        except (KeyError, TypeError, AttributeError) as error:
            raise QkovError(
                f"{opened.file.address} does not state the population that its tokens are from; expected a checkpoint "
                f"of qkov reproduce"
            ) from error
        (weights,) = opened.layers()
        embedding = exact_population(setting).embedding
        factor = weights.W_Q if weights.W_Q is not None else weights.W_V
        model = SingleLayerAttention(
            embedding.shape[1],
            setting.M,
            parameterization,
            d_head=None if factor is None else factor.shape[-1],
            heads=weights.heads,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(getattr(weights, name)[None])
        return cls(model, embedding, query_among_keys=False, name=str(address))

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
        """Return the logits of the classes; see `AttentionModel`. They are zero where there is no key to attend to."""
        self.demand_no_token_types(token_types)
        vectors = self.embed(tokens) if embedded is None else embedded
        qk, ov = (product[self._run] for product in self._model.products())
        examples, read = torch.arange(len(tokens)), self.readout(mask)
        keys = mask.clone()
        keys[examples, read] &= self._query_among_keys
        scores = torch.einsum("bkd,hde,be->bhk", vectors, qk, vectors[examples, read]) * self._model.score_scale
        attention = scores.masked_fill(~keys[:, None], -torch.inf).softmax(dim=-1)
        attention = torch.where(keys.any(dim=1)[:, None, None], attention, 0.0)
        identity = torch.eye(tokens.shape[1], dtype=attention.dtype).expand(len(tokens), self.heads, -1, -1)
        is_query = torch.arange(tokens.shape[1]) == read[:, None]
        whole = torch.where(is_query[:, None, :, None], attention[:, :, None], identity)
        if inputs is not None:
            inputs(0, vectors)
        if maps is not None:
            maps(0, whole)
        # The outputs are computed from the map that was handed on, so that gradients with respect to it exist.
        return torch.einsum("bhk,bkd,hcd->bc", whole[examples, :, read], vectors, ov)

    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return the vectors of the tokens.

        Raises:
            CallError: An id is not in the vocabulary.
        """
        if bool(((tokens < 0) | (tokens >= len(self._embedding))).any()):
            raise CallError(
                f"{self.name} has tokens 0 to {len(self._embedding) - 1}, got ids from {int(tokens.min())} to "
                f"{int(tokens.max())}; check that this is the task that it was trained on"
            )
        return self._embedding[tokens]

    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the last token of each example, which is the only query."""
        return last_token(mask)

    def attention_weights(self) -> list[AttentionWeights]:
        """Return the weights of the layer; the width of what it writes is the number of classes."""
        weights: dict[str, Any] = {name: whole[self._run].detach() for name, whole in self._model.named_parameters()}
        return [AttentionWeights(0, **weights)]
