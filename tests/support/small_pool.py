"""A small pool of pages, and stored nodes of any shape for it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from criticalkv.services.decode.opening import ChainOpener
from criticalkv.services.decode.pages import Pages
from criticalkv.services.decode.places import GroupPlaces, PagePlaces, pages_needed
from criticalkv.services.decode.resident import NodeView, ResidentNode, Residents
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.quantized import quantize_layer
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.wire import TORCH_DTYPE
from criticalkv.shared.identity import CODEC_RAW, Identity, tenant_salt, tokens_digest
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.node_store import NodeStore
from criticalkv.shared.publish import publish_cache

PAGE = 4
SALT = tenant_salt("local")
DIGEST = "ab" * 32


def spec_of(layers: int = 2, heads: int = 3, dim: int = 8, dtype: str = "float32") -> ModelSpec:
    """A model that is never run."""
    return ModelSpec(
        name="none",
        path="",
        model_digest=DIGEST,
        tokenizer_digest=DIGEST,
        dtype=dtype,
        device="cpu",
        num_layers=layers,
        num_q_heads=2 * heads,
        num_kv_heads=heads,
        head_dim=dim,
        hidden_size=2 * heads * dim,
        max_positions=4096,
        eos_token_ids=(),
        sliding_windows=(None,) * layers,
    )


class SmallPool:
    """Pages, residents, a store and an opener over them.

    Args:
        total: pages.
        keep: most pages of nodes that nobody uses.
        page_size: slots per page.
        spec: of the model.
        store: instead of an own one.
    """

    def __init__(
        self,
        total: int = 500,
        keep: int = 500,
        page_size: int = PAGE,
        spec: ModelSpec | None = None,
        store: NodeStore | None = None,
    ) -> None:
        self.spec = spec or spec_of()
        self.store = MemoryStore() if store is None else store
        itemsize = TORCH_DTYPE[self.spec.dtype].itemsize
        page_bytes = page_size * (2 * itemsize * self.spec.head_dim + 4)
        self.pages = Pages(self.spec, torch.device("cpu"), total * page_bytes, page_size)
        self.residents = Residents(self.pages, keep * page_bytes)
        self.opener = ChainOpener(self.store, self.spec, self.pages, self.residents)
        self.pages.keys.fill_(torch.nan)  # what nobody wrote must never be read
        self.pages.values.fill_(torch.nan)

    @property
    def heads(self) -> tuple[int, int]:
        """(layers, kv_heads)."""
        return self.spec.num_layers, self.spec.num_kv_heads

    @property
    def used(self) -> int:
        """Pages that are not free."""
        return self.pages.total - self.pages.free

    def publish(
        self,
        lens: Sequence[Sequence[Sequence[int]]],
        tiers: Sequence[str] = ("1",),
        parent: Manifest | None = None,
        salt: str = SALT,
        seed: int = 0,
        codec: str = CODEC_RAW,
    ) -> tuple[Manifest, RaggedCache]:
        """Store a node of random entries; `lens` is its tier table [tier][layer][head].

        What is returned has not been quantized.
        """
        cache = random_cache(self.spec, lens, tiers, parent.next_position if parent else 0, seed)
        ancestors = (*parent.ancestors, parent.node_id) if parent else ()
        tokens = [seed] * cache.num_tokens
        identity = Identity(
            model_digest=self.spec.model_digest,
            tokenizer_digest=self.spec.tokenizer_digest,
            dtype=self.spec.dtype,
            codec=codec,
            policy="dense",
            salt=salt,
            parent=ancestors[-1] if ancestors else None,
            view=("1",) * len(ancestors),
            tokens=tokens_digest(tokens),
        )
        published = publish_cache(
            self.store,
            identity,
            cache,
            token_ids=tokens,
            ancestors=ancestors,
            attempt=secrets.token_hex(16),
        )
        return published.manifest, cache

    def hold(self, manifest: Manifest, cache: RaggedCache, tier: str | None = None) -> ResidentNode:
        """Put a node into the pool, complete and used once."""
        node = self.begin(manifest, tier)
        for index in range(manifest.num_layers):
            self.write(node, index, cache.at_tier(node.tier))
        node.arrived(manifest.num_layers)
        return node

    def write(self, node: ResidentNode, index: int, held: RaggedCache) -> None:
        """Write a layer of a node, of which not more is held than it holds."""
        places, layer = node.places, held.layers[index]
        if isinstance(places, GroupPlaces):
            layout = node.manifest.layout
            assert layout is not None
            groups = quantize_layer(layer, held.tier_lens[:, index], layout)
            places.write(self.pages, index, groups)
        else:
            assert isinstance(places, PagePlaces)
            places.write(self.pages, index, layer)

    def begin(self, manifest: Manifest, tier: str | None = None) -> ResidentNode:
        """Take pages for a node of which nothing has come, used once."""
        tier = tier or manifest.tiers[-1]
        size = self.pages.page_size
        pages = self.residents.take(pages_needed(manifest, tier, size))
        assert pages is not None
        node = ResidentNode(manifest, tier, size, pages)
        self.residents.add(node)
        return node

    def turn(self, views: Sequence[NodeView] = (), tokens: int = 0) -> TurnKV:
        """A turn over nodes, whose users the caller has counted, with room for tokens."""
        first = views[-1].node.manifest.next_position if views else 0
        kv = TurnKV(self.residents, self.pages, views, first, self.heads)
        self.grow(kv, tokens)
        return kv

    def grow(self, kv: TurnKV, tokens: int) -> None:
        """Take what more tokens need."""
        pages = self.residents.take(kv.missing_pages(tokens))
        assert pages is not None
        kv.grow(pages)

    def assert_empty(self) -> None:
        """Every page can be had, and none twice."""
        self.residents.make_room(self.pages.total)
        pages = self.pages.take(self.pages.total)
        assert pages is not None, f"{self.used} pages are lost"
        assert sorted(pages.tolist()) == list(range(self.pages.total))
        self.pages.give_back(pages)


def random_cache(
    spec: ModelSpec,
    lens: Sequence[Sequence[Sequence[int]]],
    tiers: Sequence[str],
    first_position: int,
    seed: int,
) -> RaggedCache:
    """Random entries, at positions in no order."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.tensor(lens)
    tokens = max(1, int(table.max()))

    def layer(counts: list[int]) -> RaggedLayer:
        shape = (sum(counts), spec.head_dim)
        dtype = TORCH_DTYPE[spec.dtype]
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        orders = [torch.randperm(tokens, generator=generator)[:n] for n in counts]
        positions = (first_position + torch.cat(orders)).to(torch.int32)
        return RaggedLayer(keys, values, positions, cu_seqlens_of(counts))

    layers = tuple(layer(counts) for counts in table[-1].tolist())
    return RaggedCache(layers, tokens, first_position + tokens, tuple(tiers), table)
