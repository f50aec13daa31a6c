"""The queries and the keys of a map: which are tokens, which count, and where they stand in their sequences."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...analyses.attention.maps.columns import Columns, Unknown
from .positions import Positions


@dataclass(frozen=True, eq=False)
class Sides:
    """The queries and the keys of a map.

    Attributes:
        keys: True where a key is a token.
        queries: True where a query is a token.
        asked: The queries that count; all of them are tokens.
        relevant: The keys that are relevant; all of them are tokens. None if that is not known.
        relevant_tokens: The number of relevant tokens of each example so far, be their keys in the map or not.
        has_relevant: Whether any of them is in the sequence of a query, where several are packed into a row.
        tokens: The number of tokens of each example so far.
        readout: The query at which attention is read.
        readable: Whether the query there is a token.
        columns: The columns that the map stands in; None if queries and keys are of two sequences.
        positions: Where the queries are in their sequences; None if the keys are of another sequence.
        seen: Which keys a query can see, from the mask of the layer; None if that is not known.
        padded: Whether any query or key is not a token.
    """

    keys: Bool[Tensor, "batch key"]
    queries: Bool[Tensor, "batch query"]
    asked: Bool[Tensor, "batch query"]
    relevant: Bool[Tensor, "batch key"] | None
    relevant_tokens: Int[Tensor, " batch"] | None
    has_relevant: Bool[Tensor, "batch query"] | None
    tokens: Int[Tensor, " batch"]
    readout: Int[Tensor, " batch"]
    readable: Bool[Tensor, " batch"]
    columns: Columns | Unknown | None
    positions: Positions | Unknown | None
    seen: Bool[Tensor, "#batch #query key"] | None
    padded: bool

    def block(self, queries: slice, seen: Bool[Tensor, "#batch #query key"]) -> "Sides":
        """Return the sides of some of the queries; where attention is read, and the columns, stay those of all of them.

        Args:
            queries: The queries.
            seen: Which keys they see.
        """
        positions = self.positions
        return replace(
            self,
            queries=self.queries[:, queries],
            asked=self.asked[:, queries],
            has_relevant=None if self.has_relevant is None else self.has_relevant[:, queries],
            positions=positions.block(queries) if isinstance(positions, Positions) else positions,
            seen=seen,
        )

    def column_of_readout(self) -> Tensor:
        """Return the column at which attention is read; NaN if it is not known."""
        if isinstance(self.columns, Unknown):
            return torch.full_like(self.readout, torch.nan, dtype=torch.float64)
        return self.readout if self.columns is None else self.readout + self.columns.query
