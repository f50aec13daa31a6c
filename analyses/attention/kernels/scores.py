"""The scores and weights of a fused kernel, computed a second time from its queries and keys, block by block."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

#: What is added to a score to hide a key: models write -1e4, -1e9, the least number of a type or minus infinity.
HIDDEN = -1e4
#: A block has at most this many scores, unless a single query has more.
_BLOCK = 1 << 21

#: Takes the first and the last query of a block (exclusive), and returns which keys they see (bool), or what is added
#: to their scores; the shape broadcasts to [batch, head, query, key].
MaskRows = Callable[[int, int], Tensor]


@dataclass(frozen=True, eq=False)
class ScoreBlock:
    """Some queries of a layer: their weights, and what they were formed of.

    Attributes:
        queries: The queries.
        weights: Their weights, before dropout; 0 for a query that sees no key.
        seen: True where any head of a query sees a key.
        largest: The largest score of each query over the keys that it sees and that are tokens; minus infinity where
            there is none. None if it was not asked for.
    """

    queries: slice
    weights: Float[Tensor, "batch head query key"]
    seen: Bool[Tensor, "#batch #query key"]
    largest: Float[Tensor, "batch head query"] | None


@dataclass(frozen=True, eq=False)
class KernelCall:
    r"""What a kernel of attention was called with.

    The score of query i and key j is s_ij = c(scale q_i . k_j), with c(x) = softcap tanh(x / softcap) where there is a
    soft cap; the weights are softmax_j(s_ij + b_ij) over the keys that i sees, where b is what masks and biases add,
    and where a sink (a learned number for each head) takes part in the sum and has no key.

    Attributes:
        query: The queries.
        key: The keys; a group of heads shares each of them.
        scale: The factor of the products.
        masks: What hides keys or is added to scores.
        softcap: The soft cap; None if there is none.
        sinks: The score of each head's sink; None if there is none.
        width: The number of keys of the layer. The kernel may have been given the first of them alone.
        dropout: The rate at which the kernel drops weights.
        mask: The tensor among the masks that says which query sees which key; None if there is none.
    """

    query: Float[Tensor, "#batch head query d_head"]
    key: Float[Tensor, "#batch key_head key d_head"]
    scale: float
    masks: tuple[MaskRows, ...] = ()
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None
    width: int | None = None
    dropout: float = 0.0
    mask: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the map that the call stands for: batch, head, query, key."""
        batch = max(len(self.query), len(self.key))
        return batch, self.query.shape[1], self.query.shape[2], self.width or self.key.shape[2]

    def widened(self, width: int) -> "KernelCall":
        """Return the call as that of a layer with more keys, which have no weight.

        Args:
            width: The number of keys of the layer.
        """
        return replace(self, width=width)

    def with_heads_apart(self) -> "KernelCall":
        """Return the call of a single query whose heads stand in the place of queries, with each head by itself."""
        groups, rows = self.query.shape[1:3]

        def apart(mask: MaskRows) -> MaskRows:
            part = mask(0, rows)
            by_head = part.shape[1] > 1 or part.shape[2] > 1
            return of_tensor(part.expand(-1, groups, rows, -1).flatten(1, 2).unsqueeze(2) if by_head else part)

        shared = self.mask is not None and self.mask.shape[1] == self.mask.shape[2] == 1
        return replace(
            self,
            query=self.query.flatten(1, 2).unsqueeze(2),
            masks=tuple(apart(mask) for mask in self.masks),
            mask=self.mask if shared else None,
        )

    def blocks(self, tokens: Bool[Tensor, "batch key"] | None = None, *, largest: bool = False) -> Iterator[ScoreBlock]:
        """Yield the weights of some queries after the other, in float32 or better.

        Args:
            tokens: True where a key is a token, for `largest`; None if all are.
            largest: Whether the largest scores are asked for.
        """
        batch, heads, queries, width = self.shape
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        groups, keys = self.key.shape[1], self.key.shape[2]
        keys_across = self.key.detach().to(dtype).transpose(2, 3)
        step = max(1, _BLOCK // max(1, batch * heads * keys))
        hidden_tokens = None if tokens is None or bool(tokens.all()) else ~tokens[:, None, None, :keys]
        for first in range(0, queries, step):
            last = min(first + step, queries)
            part = self.query[:, :, first:last].detach().to(dtype) * self.scale
            # The heads of a group stand side by side, so that their keys are not copied.
            scores = part.unflatten(1, (groups, heads // groups)).flatten(2, 3) @ keys_across
            scores = scores.unflatten(2, (heads // groups, last - first)).flatten(1, 2)
            if self.softcap is not None:
                scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
            seen, scores, most = self._masked(scores, first, last, hidden_tokens, largest)
            weights = self._weights(scores)
            if width > keys:
                # A kernel that was given the first keys alone gives the others no weight.
                weights = torch.nn.functional.pad(weights, (0, width - keys))
                seen = torch.nn.functional.pad(seen, (0, width - keys))
            yield ScoreBlock(slice(first, last), weights, seen, most)

    def _masked(
        self,
        scores: Float[Tensor, "batch head query key"],
        first: int,
        last: int,
        hidden_tokens: Bool[Tensor, "batch 1 1 key"] | None,
        largest: bool,
    ) -> tuple[Bool[Tensor, "#batch #query key"], Float[Tensor, "batch head query key"], Tensor | None]:
        """Return which keys are seen, the scores with what masks add, and the largest without it."""
        seen = torch.ones(1, 1, 1, scores.shape[-1], dtype=torch.bool, device=scores.device)
        hidden: Tensor | None = None
        added: list[Tensor] = []
        for mask in self.masks:
            part = mask(first, last)
            if part.dtype == torch.bool:
                hidden = ~part if hidden is None else hidden | ~part
                seen = seen & part
            else:
                added.append(part)
                seen = seen & (part > HIDDEN)
        if hidden is not None:
            scores = scores.masked_fill_(hidden, -torch.inf)
        most = None
        if largest:
            over = scores
            for part in added:
                over = over.masked_fill(part <= HIDDEN, -torch.inf)
            most = (over if hidden_tokens is None else over.masked_fill(hidden_tokens, -torch.inf)).amax(dim=-1)
        for part in added:
            scores = scores.add_(part)
        return seen.any(dim=1), scores, most

    def _weights(self, scores: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head query key"]:
        top = scores.amax(dim=-1, keepdim=True)
        sinks = None if self.sinks is None else self.sinks.detach().to(scores).view(1, -1, 1, 1)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks - top).exp()
        # Kernels give a query that sees no key no weight at all.
        return weights.div_(total.masked_fill(total == 0, 1.0))


def of_tensor(mask: Tensor) -> MaskRows:
    """Return a mask whose rows are those of a tensor.

    Args:
        mask: It broadcasts to [batch, head, query, key].
    """

    def rows(first: int, last: int) -> Tensor:
        return mask if mask.shape[-2] == 1 else mask[..., first:last, :]

    return rows


def causal(queries: Tensor, keys: Tensor) -> MaskRows:
    """Return the mask that hides what comes later.

    Args:
        queries: The place of each query, [query] or [batch, query].
        keys: The place of each key, in the same form.
    """

    def rows(first: int, last: int) -> Tensor:
        return _shaped(queries[..., first:last, None] >= keys[..., None, :])

    return rows


def window(queries: Tensor, keys: Tensor, size: int) -> MaskRows:
    """Return the mask that hides the keys that are `size` places away or more.

    Args:
        queries: The place of each query, [query] or [batch, query].
        keys: The place of each key, in the same form.
        size: The size.
    """

    def rows(first: int, last: int) -> Tensor:
        return _shaped((queries[..., first:last, None] - keys[..., None, :]).abs() < size)

    return rows


def equal(queries: Tensor, keys: Tensor) -> MaskRows:
    """Return the mask that hides the keys whose number differs from the query's, such as the number of a sequence.

    Args:
        queries: The number of each query, [query] or [batch, query].
        keys: The number of each key, in the same form.
    """

    def rows(first: int, last: int) -> Tensor:
        return _shaped(queries[..., first:last, None] == keys[..., None, :])

    return rows


def _shaped(mask: Bool[Tensor, "*batch query key"]) -> Bool[Tensor, "#batch 1 query key"]:
    return mask[None, None] if mask.ndim == 2 else mask[:, None]
