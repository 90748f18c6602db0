"""Sequences over chains of nodes in a small pool, and what their heads see, naively."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from small_pool import PAGE, SmallPool, spec_of
from torch import Tensor

from criticalkv.services.decode.batch import BatchPlan, Member
from criticalkv.services.decode.resident import NodeView, ResidentNode
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.services.local.side_by_side import as_read
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import TORCH_DTYPE
from criticalkv.shared.model.attention import LayerCall

TIERS = ("0.2", "1")
ROOT = [[[1, 0, 2], [1, 1, 0]], [[5, 2, 9], [4, 8, 1]]]
MID = [[[3, 0, 5], [0, 1, 4]]]
LEAF = [[[2, 2, 2], [2, 2, 2]]]
SMALL = (ROOT, MID, LEAF)
LARGE = (
    [[[1, 0, 40], [33, 1, 0]], [[50, 2, 91], [64, 8, 1]]],
    [[[3, 0, 35], [0, 1, 4]]],
    LEAF,
)
"""Of more than a group, and of groups that are not full."""
RAW = ("raw", "raw", "raw")
SCALING = 0.4
FLOOR = 2e-6  # of fp32 against fp64, at entries of order 1
CPU = torch.device("cpu")


@dataclass
class Known:
    """A sequence, and what its heads have seen, kept apart from the pool."""

    kv: TurnKV
    caches: list[RaggedCache] = field(default_factory=list)
    own: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    """[token][layer] → keys and values, [heads, dim]."""

    @property
    def position(self) -> int:
        return self.kv.first_position + len(self.own)

    def entries(self, layer: int, head: int, own: int) -> list[tuple[Tensor, Tensor, int]]:
        out = []
        for cache in self.caches:
            keys, values, positions = cache.layers[layer].head(head)
            out += list(zip(keys, values, positions.tolist(), strict=True))
        for t in range(own):
            keys, values = self.own[t][layer]
            out.append((keys[head], values[head], self.kv.first_position + t))
        return out


class World:
    """Sequences over chains of three nodes, read at various tiers and depths.

    Args:
        chains: the codecs of each one's nodes.
        tables: the nodes' tier tables, [tier][layer][head] each.
        page_size: slots per page.
        dtype: of entries and queries.
    """

    def __init__(
        self,
        chains: Sequence[tuple[str, str, str]] = (RAW,),
        tables: Sequence[list[list[list[int]]]] = SMALL,
        page_size: int = PAGE,
        dtype: str = "float32",
    ) -> None:
        self.pool = SmallPool(page_size=page_size, spec=spec_of(dtype=dtype))
        self.chains = [self._chain(10 * i, codecs, tables) for i, codecs in enumerate(chains)]
        self.generator = torch.Generator().manual_seed(3)

    @property
    def nodes(self) -> list[ResidentNode]:
        return [node for chain in self.chains for node, _ in chain]

    def sequence(self, *tiers: str, chain: int = 0) -> Known:
        pairs = list(zip(self.chains[chain], tiers, strict=False))
        views = [NodeView(node, tier) for (node, _), tier in pairs]
        for view in views:
            self.pool.residents.use(view.node)
        caches = [cache.at_tier(tier) for (_, cache), tier in pairs]
        return Known(self.pool.turn(views), caches)

    def close(self, known: Sequence[Known]) -> None:
        """End all sequences; every page must come back."""
        for each in known:
            each.kv.close()
        for node in self.nodes:
            self.pool.residents.leave(node)
        self.pool.assert_empty()

    def _chain(
        self, seed: int, codecs: Sequence[str], tables: Sequence[list[list[list[int]]]]
    ) -> list[tuple[ResidentNode, RaggedCache]]:
        """Nodes in the pool, and their entries as readers get them."""
        made: list[tuple[ResidentNode, RaggedCache]] = []
        for i, (codec, lens) in enumerate(zip(codecs, tables, strict=True)):
            parent = made[-1][0].manifest if made else None
            tiers = TIERS if len(lens) > 1 else ("1",)
            manifest, cache = self.pool.publish(lens, tiers, parent, seed=seed + i, codec=codec)
            made.append((self.pool.hold(manifest, cache), as_read(cache, codec)))
        return made

    def random(self, *shape: int) -> Tensor:
        made = torch.randn(shape, generator=self.generator)
        return made.to(TORCH_DTYPE[self.pool.spec.dtype])


@dataclass
class Tokens:
    """What a sequence's next tokens are made of, by layer."""

    query: Tensor  # [layers, num_q_heads, T, dim]
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, world: World, count: int) -> Tokens:
        layers, heads = world.pool.heads
        shape = (count, world.pool.spec.head_dim)
        sizes = (2 * heads, heads, heads)
        return cls(*(world.random(layers, size, *shape) for size in sizes))

    @property
    def count(self) -> int:
        return self.key.shape[2]


def step(
    world: World, members: Sequence[tuple[Known, Tokens]], window: int | None = None
) -> list[Tensor]:
    """Run a step; return each member's output, [layers, num_q_heads, T, dim]."""
    listed = []
    for known, tokens in members:
        world.pool.grow(known.kv, tokens.count)
        listed.append(Member(known.kv, [7] * tokens.count, known.position, lambda: None))
        for t in range(tokens.count):
            layers = zip(tokens.key[:, :, t], tokens.value[:, :, t], strict=True)
            known.own.append(list(layers))
    plan = BatchPlan(world.pool.pages, listed, CPU)
    outs = []
    for layer in range(world.pool.spec.num_layers):
        q, k, v = (
            torch.cat([getattr(tokens, name)[layer] for _, tokens in members], 1)
            for name in ("query", "key", "value")
        )
        outs.append(plan.attend(LayerCall(layer, q, k, v, SCALING, window)))
    return list(torch.stack(outs).split([tokens.count for _, tokens in members], dim=2))


def naive(known: Known, tokens: Tokens, window: int | None = None) -> Tensor:
    """Every query over the entries it sees, in fp64; to be called after the step."""
    out = torch.zeros(tokens.query.shape, dtype=torch.float64)
    before = len(known.own) - tokens.count
    for layer, head, t in torch.cartesian_prod(*map(torch.arange, out.shape[:3])).tolist():
        position = known.kv.first_position + before + t
        seen = known.entries(layer, head // 2, before + t + 1)
        if window is not None:
            seen = [entry for entry in seen if entry[2] > position - window]
        query = tokens.query[layer, head, t].double()
        weights = [math.exp(SCALING * float(query @ key.double())) for key, _, _ in seen]
        for weight, (_, value, _) in zip(weights, seen, strict=True):
            out[layer, head, t] += weight / sum(weights) * value.double()
    return out
