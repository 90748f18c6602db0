"""The KV of one running sequence: views of its chain's nodes, then its turn's own pages.

The own pages of a turn are the same in number for every layer and head. Nothing that is
in a page is ever copied or moved; a fork shares what its turn has so far.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from criticalkv.services.decode.pages import Ints, Pages
from criticalkv.services.decode.resident import NodeView, Residents
from criticalkv.shared.cache.ragged import RaggedCache, dense_layer


class TurnPart:
    """Own tokens that several sequences share since a fork.

    Attributes:
        pages: int32 [layers, kv_heads, pages of a head].
        length: tokens.

    Args:
        users: sequences over it.
    """

    def __init__(self, pages: Ints, length: int, users: int) -> None:
        self.pages = pages
        self.length = length
        self._users = users
        self._lock = threading.Lock()

    def use(self) -> None:
        """Count a user."""
        with self._lock:
            self._users += 1

    def leave(self) -> bool:
        """Count a user less; return whether it was the last one."""
        with self._lock:
            self._users -= 1
            return self._users == 0


class TurnKV:
    """Which pages a sequence's heads read, in order, and where its next tokens go.

    Attributes:
        tables: int32 [layers, kv_heads, places], page of each place; a head with fewer
            pages than others leaves places empty.
        fills: int32, like tables: slots in use.
        groups: by their layout, tables and fills of the quantized nodes' groups.

    Args:
        residents: where pages come from.
        pages: their memory.
        views: the chain, root first; the caller counts itself as their user.
        first_position: original position of the turn's first token.
        heads: (layers, kv_heads).
        parts: own tokens that are there already.
    """

    def __init__(
        self,
        residents: Residents,
        pages: Pages,
        views: Sequence[NodeView],
        first_position: int,
        heads: tuple[int, int],
        parts: Sequence[TurnPart] = (),
    ) -> None:
        self._residents = residents
        self._pages = pages
        self.views = tuple(views)
        self.first_position = first_position
        self._heads = heads
        self._parts = tuple(parts)
        self._own: Ints = np.empty((*heads, 0), np.int32)
        self.length = sum(part.length for part in parts)
        self._own_length = 0
        self.tables, self.fills = _tables([v for v in views if not v.layout], heads)
        layouts = dict.fromkeys(view.layout for view in views if view.layout)
        self.groups = {x: _tables([v for v in views if v.layout == x], heads) for x in layouts}
        for part in parts:
            self._place(part.pages, part.length)

    @property
    def capacity(self) -> int:
        """Own tokens for which there are pages."""
        return int(self._own.shape[2]) * self._pages.page_size

    def missing_pages(self, tokens: int) -> int:
        """Pages that `tokens` more own tokens need beyond those that are there."""
        size = self._pages.page_size
        wanted = math.ceil((self._own_length + tokens) / size) - self._own.shape[2]
        return int(max(0, wanted)) * math.prod(self._heads)

    def grow(self, pages: Ints) -> None:
        """Take more pages for own tokens, a multiple of layers · kv_heads."""
        if pages.size:
            more = pages.reshape(*self._heads, -1)
            self._own = np.concatenate([self._own, more], 2)
            self._place(more, 0)

    def append(self, tokens: int) -> NDArray[np.int64]:
        """Claim slots for the next own tokens; int64 [layers, tokens, kv_heads] rows."""
        size = self._pages.page_size
        slots = np.arange(self._own_length, self._own_length + tokens)
        pages = self._own[:, :, slots // size].astype(np.int64)
        self._own_length += tokens
        self.length += tokens
        self._fill(self._own.shape[2], self._own_length)
        return pages.transpose(0, 2, 1) * size + (slots % size)[:, None]

    def own(self, num_tokens: int) -> RaggedCache:
        """Return the KV, on the CPU, of the turn's first `num_tokens` tokens."""
        layers, heads = self._heads
        rows = torch.from_numpy(self._own_rows()[:, :, :num_tokens]).to(self._pages.keys.device)
        made = []
        for layer in range(layers):
            keys, values, _ = self._pages.read(rows[layer].reshape(-1))
            shape = (heads, num_tokens, keys.shape[1])
            flat = (keys.view(shape).cpu(), values.view(shape).cpu())
            made.append(dense_layer(*flat, self.first_position))
        lens = torch.full((1, layers, heads), num_tokens, dtype=torch.int64)
        end = self.first_position + num_tokens
        return RaggedCache(tuple(made), num_tokens, end, ("1",), lens)

    def restore(self, cache: RaggedCache) -> None:
        """Write back what `own` returned, into pages that `grow` took."""
        rows = torch.from_numpy(self.append(cache.num_tokens))
        device = self._pages.keys.device
        for layer, held in zip(rows, cache.layers, strict=True):
            target = layer.transpose(0, 1).reshape(-1).to(device)
            parts = (held.keys.to(device), held.values.to(device), held.positions.to(device))
            self._pages.write(target, *parts)

    def fork(self, branches: int) -> list[TurnKV]:
        """Return sequences that begin with this one's tokens; it goes on itself, too."""
        if self._own_length:
            count = math.ceil(self._own_length / self._pages.page_size)
            self._pages.give_back(self._own[:, :, count:])  # nobody would fill them
            part = TurnPart(self._own[:, :, :count], self._own_length, 1)
            self._parts = (*self._parts, part)
            self._own, self._own_length = self._own[:, :, :0], 0
        made = []
        for _ in range(branches):
            for shared in self._parts:
                shared.use()
            for view in self.views:
                self._residents.use(view.node)
            kv = (self._residents, self._pages, self.views, self.first_position)
            made.append(TurnKV(*kv, self._heads, self._parts))
        return made

    def keep_own(self, num_tokens: int) -> Ints | None:
        """Hand over the pages of the first `num_tokens` tokens, if nobody else has them.

        Returns:
            int32 [layers, kv_heads, pages of a head]; None if they are shared.
        """
        if self._parts:
            return None
        count = math.ceil(num_tokens / self._pages.page_size)
        kept, rest = self._own[:, :, :count], self._own[:, :, count:]
        self._pages.give_back(rest)
        self._own = self._own[:, :, :0]
        return kept

    def close(self) -> None:
        """Give everything back."""
        self._pages.give_back(self._own)
        self._own = self._own[:, :, :0]
        for part in self._parts:
            if part.leave():
                self._pages.give_back(part.pages)
        self._parts = ()
        for view in self.views:
            self._residents.leave(view.node)
        self.views = ()

    def _own_rows(self) -> NDArray[np.int64]:
        size = self._pages.page_size
        pieces = [(part.pages, part.length) for part in self._parts]
        rows = []
        for pages, length in [*pieces, (self._own, self._own_length)]:
            slots = pages[..., None].astype(np.int64) * size + np.arange(size)
            rows.append(slots.reshape(*self._heads, -1)[:, :, :length])
        return np.ascontiguousarray(np.concatenate(rows, 2))

    def _place(self, pages: Ints, length: int) -> None:
        self.tables = np.concatenate([self.tables, pages], 2)
        self.fills = np.concatenate([self.fills, np.zeros_like(pages)], 2)
        self._fill(pages.shape[2], length)

    def _fill(self, count: int, length: int) -> None:
        """Set the fills of the last `count` places, which hold `length` tokens."""
        if count:
            size = self._pages.page_size
            full = np.clip(length - size * np.arange(count), 0, size)
            self.fills[:, :, -count:] = full


def _tables(views: Sequence[NodeView], heads: tuple[int, int]) -> tuple[Ints, Ints]:
    """List the places of nodes, and their fills, head by head, without gaps."""
    counts = [view.counts for view in views]
    begin = np.zeros(heads, np.int32)
    width = int(np.sum(counts, 0).max()) if views else 0
    tables = np.zeros((*heads, width), np.int32)
    fills = np.zeros((*heads, width), np.int32)
    for view, count in zip(views, counts, strict=True):
        place = np.arange(int(count.max()) if count.size else 0)
        layer, head, k = np.nonzero(place < count[..., None])
        target = (layer, head, begin[layer, head] + k)
        tables[target], fills[target] = view.places(layer, head, k)
        begin = begin + count
    return tables, fills
