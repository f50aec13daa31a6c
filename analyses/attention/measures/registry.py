"""The registry of attention measures.

To add a measure, write a function that returns its rows and add one `Measure` to `MEASURES`. It is then a method of
`attribute`, `explain` and the command line, and takes their settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float64
from torch import Tensor

from ....circuits.errors import CallError
from ..models.alternatives import Target
from ..models.model import AttentionModel, Batch
from .attention_flow import attention_flow, flow_rows
from .fusion import named_fusion
from .gradient_rollout import gradient_rollout
from .readout_rows import fuse_rows, last_layer, layer_mean
from .rollout import ABNAR_ZUIDEMA, Rollout, rollout
from .shared_run import SharedRun
from .value_norms import value_norms


@runtime_checkable
class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str:
        """The name by which the entry is found."""
        ...


Entry = TypeVar("Entry", bound=Named)


class Registry(dict[str, Entry], Generic[Entry]):
    """Entries of one kind by name, in the order in which they were added.

    Attributes:
        kind: what the entries are, for messages.
    """

    def __init__(self, kind: str, entries: Sequence[Entry]) -> None:
        """Create a registry.

        Args:
            kind: what the entries are, for messages.
            entries: the first entries.

        Raises:
            CallError: Two entries have the same name.
        """
        super().__init__()
        self.kind = kind
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry.

        Raises:
            CallError: There is an entry of that name.
        """
        if entry.name in self:
            raise CallError(f"there is already an {self.kind} named {entry.name!r}; choose another name")
        self[entry.name] = entry

    def __missing__(self, name: str) -> Entry:
        """Raise `CallError` with the known names."""
        raise CallError(f"there is no {self.kind} {name!r}; expected one of {', '.join(self)}")


@dataclass(frozen=True)
class MeasureSettings:
    """The settings of attention measures; each measure uses those that `Measure.uses` names.

    Attributes:
        rollout: how heads are fused, how much of the identity is mixed in, and which layers take part.
        target: the alternative that gradients explain: what the model predicts, or the example's label.
    """

    rollout: Rollout = ABNAR_ZUIDEMA
    target: Target = "predicted"


#: The settings of the measures' sources.
DEFAULT_SETTINGS = MeasureSettings()

Rows = Float64[Tensor, "batch position"]


@dataclass(frozen=True)
class Measure:
    """An attention measure: a row of weights over the tokens of each example, read where the prediction is read.

    Calling a measure with a model and a batch returns its rows.

    Attributes:
        name: name by which the measure is requested.
        rows: returns the rows [batch, position] for a model, a batch and settings. Each row sums to 1 over the tokens
            of its example, or is all zero if nothing supports the target, and is 0 on padding.
        uses: the settings that change the result: "residual", "heads", "discard" and "layers", the attributes of
            `Rollout`, and "target".
        source: publication that defines the measure, or a description of it.
        streamed: for a measure that needs no gradients: names its collectors in a `SharedRun` and returns a function
            that computes the rows after the run. Such measures share one run of the model. None for a measure that
            runs the model itself.
        quick: whether the measure is among the default methods of `explain`; false if it takes much longer than a few
            runs of the model.
    """

    name: str
    rows: Callable[[AttentionModel, Batch, MeasureSettings], Rows]
    uses: frozenset[str]
    source: str
    streamed: Callable[[SharedRun], Callable[[], Rows]] | None = None
    quick: bool = True

    def __call__(self, model: AttentionModel, batch: Batch, settings: MeasureSettings = DEFAULT_SETTINGS) -> Rows:
        """Return the rows of the measure.

        Args:
            model: the model whose attention is measured.
            batch: examples.
            settings: settings, of which the measure uses those in `uses`.

        Returns:
            [batch, position].

        Raises:
            CallError: The settings do not fit the model.
            QkovError: The model's attention is not finite, or fuses to nothing.
        """
        return self.rows(model, batch, settings)


_ABNAR_ZUIDEMA = 'Abnar & Zuidema, "Quantifying Attention Flow in Transformers", 2020'
_ROLLOUT_SETTINGS = frozenset({"residual", "heads", "discard", "layers"})


def _stream_rollout(run: SharedRun) -> Callable[[], Rows]:
    maps = run.fused_maps()
    return lambda: maps.row(run.readout)


def _stream_attention_flow(run: SharedRun) -> Callable[[], Rows]:
    maps = run.fused_maps()
    return lambda: flow_rows(maps, run.readout)


def _stream_value_norms(run: SharedRun) -> Callable[[], Rows]:
    norms = run.fused_norms()
    return lambda: norms.row(run.readout)


def _stream_last_layer(run: SharedRun) -> Callable[[], Rows]:
    return lambda: fuse_rows(run.heads.rows()[:, -1:], named_fusion(run.rollout.heads))[:, 0]


def _stream_layer_mean(run: SharedRun) -> Callable[[], Rows]:
    return lambda: fuse_rows(run.heads.rows(), named_fusion(run.rollout.heads)).mean(dim=1)


#: Every attention measure by name.
MEASURES: Registry[Measure] = Registry(
    "attention measure",
    [
        Measure(
            name="rollout",
            rows=lambda model, batch, settings: rollout(model, batch, settings.rollout),
            streamed=_stream_rollout,
            uses=_ROLLOUT_SETTINGS,
            source=_ABNAR_ZUIDEMA,
        ),
        Measure(
            name="attention flow",
            rows=lambda model, batch, settings: attention_flow(model, batch, settings.rollout),
            streamed=_stream_attention_flow,
            uses=_ROLLOUT_SETTINGS,
            source=_ABNAR_ZUIDEMA,
            quick=False,  # It computes a maximum flow for every token.
        ),
        Measure(
            name="last layer",
            rows=lambda model, batch, settings: last_layer(model, batch, named_fusion(settings.rollout.heads)),
            streamed=_stream_last_layer,
            uses=frozenset({"heads"}),
            source="attention of the last layer at the readout position",
        ),
        Measure(
            name="layer mean",
            rows=lambda model, batch, settings: layer_mean(model, batch, named_fusion(settings.rollout.heads)),
            streamed=_stream_layer_mean,
            uses=frozenset({"heads"}),
            source="mean over layers of the attention at the readout position",
        ),
        Measure(
            name="value norms",
            rows=lambda model, batch, settings: value_norms(model, batch, settings.rollout),
            streamed=_stream_value_norms,
            uses=_ROLLOUT_SETTINGS - {"heads"},
            source='Kobayashi et al., "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms", 2020',
        ),
        Measure(
            name="gradient rollout",
            rows=lambda model, batch, settings: gradient_rollout(model, batch, settings.target),
            uses=frozenset({"target"}),
            source='Chefer et al., "Generic Attention-model Explainability for Interpreting Bi-Modal and '
            'Encoder-Decoder Transformers", 2021',
        ),
    ],
)


def streamed_measures() -> tuple[str, ...]:
    """Return the names of the measures that share one run of the model."""
    return tuple(name for name, measure in MEASURES.items() if measure.streamed is not None)
