"""The mass that the rollout puts on some tokens, carried up through the layers without keeping a map."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ...analyses.attention.measures.fusion import discard_smallest, fuse_heads, hide_padding
from ...analyses.attention.measures.rollout import Rollout
from ...circuits.errors import CallError
from ..maps.positions import Positions
from ..maps.sides import Sides
from .measures import sees_ahead


class RolloutMass:
    """The mass of some tokens in A_L ... A_1, computed as v_l = A_l v_{l-1} with v_0 = 1 on these tokens.

    One column of numbers is held instead of one map for each layer; for whole rows, one column for every token.
    """

    def __init__(self, settings: Rollout, sides: Sides, *, rows: bool) -> None:
        """Start at the tokens.

        Args:
            settings: How maps are fused and mixed.
            sides: The queries and keys of the maps, the same in all layers.
            rows: Whether whole rows are wanted as well as the mass on the relevant tokens.
        """
        self._settings, self._sides, self._has_rows = settings, sides, rows
        self.layers = 0
        self._sees_ahead: bool | None = False
        self._carried: list[Tensor] = []
        columns = [] if sides.relevant is None else [sides.relevant[..., None]]
        if rows:
            batch, keys = sides.keys.shape
            identity = torch.eye(keys, dtype=torch.bool, device=sides.keys.device).expand(batch, -1, -1)
            columns.append(identity & sides.keys[..., None])
        self._has_relevant = sides.relevant is not None
        self._columns = torch.cat(columns, dim=-1) if columns else None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a layer's maps lead from all positions of the first layer to all of them.

        Args:
            shape: The shape of the maps.
        """
        batch, keys = self._sides.keys.shape
        return (shape[0], *shape[2:]) == (batch, keys, keys)

    def add(self, layer: int, queries: slice, sides: Sides, attention: Float[Tensor, "batch head query key"]) -> None:
        """Carry the columns through some rows of a layer; rows and layers have to come in order.

        Args:
            layer: The number of the layer.
            queries: The rows.
            sides: Their queries and keys.
            attention: Their weights.
        """
        if self.layers == 0:
            ahead = sees_ahead(attention.shape[2], sides, queries.start)
            self._sees_ahead = None if self._sees_ahead is None or ahead is None else self._sees_ahead or ahead
        if self._columns is not None and self._settings.takes(layer):
            self._carried.append(self._carry(layer, queries, attention, self._columns))
        if queries.stop < self._sides.queries.shape[1]:
            return
        self.layers += 1
        if self._carried:
            self._columns, self._carried = torch.cat(self._carried, dim=1), []

    def _carry(
        self,
        layer: int,
        queries: slice,
        attention: Float[Tensor, "batch head query key"],
        columns: Shaped[Tensor, "batch key column"],
    ) -> Float[Tensor, "batch query column"]:
        mask = self._sides.keys.to(attention.device)
        fused = fuse_heads(attention, self._settings.heads_of(layer))
        if self._sides.padded:
            hide_padding(fused, mask, queries.start)
        discard_smallest(fused, self._settings.discard, queries.start)
        residual, columns = self._settings.residual_of(layer), columns.to(fused)
        carried = fused @ columns / fused.sum(dim=-1, keepdim=True)
        # Rows of padding sum to 0.
        carried = carried.masked_fill(~mask[:, queries, None], 0.0)
        return (1 - residual) * carried + residual * columns[:, queries]

    def mass(self) -> Float[Tensor, " batch"] | None:
        """Return the mass on the relevant tokens at each readout position; None if it is not known which are.

        It is NaN where the sequence that is read has none, and where what is read is padding.
        """
        exists = self._exists()
        if exists is None:
            return None
        mass = self._at_readout()[:, 0]
        return torch.where(exists.to(mass.device), mass, torch.nan)

    def chance(self) -> Float[Tensor, " batch"] | None:
        """Return the share of relevant tokens among all tokens; in a causal model, among those up to the readout.

        None if it is not known which tokens are relevant, NaN if it is not known whether the model is causal.
        """
        sides, exists = self._sides, self._exists()
        if sides.relevant is None or exists is None:
            return None
        if self._sees_ahead is None:
            return torch.full((len(sides.readout),), torch.nan)
        columns = torch.arange(sides.keys.shape[1], device=sides.keys.device)
        seen = sides.keys & ((columns <= sides.readout[:, None]) | self._sees_ahead)
        if isinstance(sides.positions, Positions):
            # What is packed into the row beside the sequence that is read is out of reach.
            at = sides.readout[:, None]
            seen = (
                seen & (columns >= sides.positions.start.gather(1, at)) & (columns < sides.positions.end.gather(1, at))
            )
        share = (sides.relevant & seen).sum(dim=1) / seen.sum(dim=1)
        return torch.where(exists, share, torch.nan)

    def _exists(self) -> Bool[Tensor, " batch"] | None:
        """Return whether a token is read whose sequence has a relevant one; None if it is not known which are."""
        has_relevant, readout = self._sides.has_relevant, self._sides.readout
        return None if has_relevant is None else has_relevant.gather(1, readout[:, None])[:, 0] & self._sides.readable

    def rows(self) -> Float[Tensor, "batch position"]:
        """Return the whole row at each readout position.

        Raises:
            CallError: Rows were not asked for.
        """
        if not self._has_rows:
            raise CallError("rows of rollout were not asked for: AttentionProbe(model, rollout_rows=True)")
        return self._at_readout()[:, int(self._has_relevant) :]

    def _at_readout(self) -> Float[Tensor, "batch column"]:
        assert self._columns is not None
        readout = self._sides.readout.to(self._columns.device)
        return self._columns[torch.arange(len(readout), device=readout.device), readout]
