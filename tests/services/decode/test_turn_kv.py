"""A turn's pages: nothing in them ever moves, forks share, and all of them come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_pool import PAGE, SmallPool

from criticalkv.services.decode.resident import NodeView
from criticalkv.services.decode.turn_kv import TurnKV

LENS = [[[1, 0, 4], [2, 3, 0]], [[5, 0, 9], [4, 8, 1]]]
TIERS = ("0.5", "1")
HEADS = 2 * 3


def run(pool: SmallPool, kv: TurnKV, tokens: int) -> None:
    """Grow and append random entries."""
    pool.grow(kv, tokens)
    begin = kv.first_position + kv.length
    rows = torch.from_numpy(kv.append(tokens))
    positions = torch.arange(begin, begin + tokens).repeat_interleave(pool.spec.num_kv_heads)
    for layer in rows:
        keys, values = torch.randn(2, layer.numel(), pool.spec.head_dim)
        pool.pages.write(layer.flatten(), keys, values, positions)


def seen(pool: SmallPool, kv: TurnKV, layer: int, head: int) -> list[torch.Tensor]:
    """Keys, values and positions that a head reads, in order."""
    size = pool.pages.page_size
    places = zip(kv.tables[layer, head].tolist(), kv.fills[layer, head].tolist(), strict=True)
    rows = [page * size + slot for page, fill in places for slot in range(fill)]
    return list(pool.pages.read(torch.tensor(rows, dtype=torch.int64)))


def everything(pool: SmallPool, kv: TurnKV) -> list[list[torch.Tensor]]:
    """What every head reads, layer by layer."""
    layers, heads = pool.heads
    return [seen(pool, kv, layer, head) for layer in range(layers) for head in range(heads)]


def begins_with(longer: list[list[torch.Tensor]], shorter: list[list[torch.Tensor]]) -> bool:
    pairs = zip(longer, shorter, strict=True)
    return all(x[: len(y)].equal(y) for a, b in pairs for x, y in zip(a, b, strict=True))


def test_appending_never_moves_what_is_there() -> None:
    pool = SmallPool()
    kv = pool.turn()
    tables, before = kv.tables, everything(pool, kv)
    for tokens in (1, 2, 1, 1, 7, 4, 9, 1):  # within pages, up to their end, over it
        run(pool, kv, tokens)
        after = everything(pool, kv)
        assert (kv.tables[:, :, : tables.shape[2]] == tables).all()
        assert begins_with(after, before)
        assert kv.fills.sum() == kv.length * HEADS
        assert all(len(k) == kv.length for k, _, _ in after)
        assert pool.used == -(-kv.length // PAGE) * HEADS
        tables, before = kv.tables, after
    used = kv.tables[kv.fills > 0]
    assert len(set(used.tolist())) == used.size, "no page is in two heads"
    assert [p.tolist() for *_, p in before] == [list(range(26))] * HEADS
    kv.close()
    pool.assert_empty()


def test_pages_are_missing_only_beyond_the_last_ones_end() -> None:
    pool = SmallPool()
    kv = pool.turn()
    assert [kv.missing_pages(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 6, 6, 12, 12, 18]
    run(pool, kv, 3)
    assert (kv.capacity, kv.length) == (4, 3)
    assert [kv.missing_pages(n) for n in (0, 1, 2, 5, 6)] == [0, 0, 6, 6, 12]
    kv.close()


@pytest.mark.parametrize("tier", TIERS)
def test_a_turn_reads_its_chain_then_its_own(tier: str) -> None:
    """Root first, each head's entries in rank order, partly filled pages in between."""
    pool = SmallPool()
    root, root_cache = pool.publish(LENS, TIERS)
    leaf, leaf_cache = pool.publish([[[0, 2, 5], [1, 0, 4]]], parent=root, seed=1)
    views = [
        NodeView(pool.hold(root, root_cache), tier),
        NodeView(pool.hold(leaf, leaf_cache), "1"),
    ]
    kv = pool.turn(views)
    run(pool, kv, 6)
    caches = (root_cache.at_tier(tier), leaf_cache)
    for layer in range(2):
        for head in range(3):
            parts = [cache.layers[layer].head(head) for cache in caches]
            got = seen(pool, kv, layer, head)
            own = kv.own(6).layers[layer].head(head)
            for kind in range(3):
                assert got[kind].equal(torch.cat([*(p[kind] for p in parts), own[kind]]))
    assert int(own[2][0]) == leaf.next_position
    kv.close()
    pool.assert_empty()


@pytest.mark.parametrize("before", [1, 4, 6])
def test_a_fork_shares_what_is_there_and_nobody_writes_to_it(before: int) -> None:
    pool = SmallPool()
    manifest, cache = pool.publish(LENS, TIERS)
    node = pool.hold(manifest, cache)
    kv = pool.turn([NodeView(node, "1")])
    run(pool, kv, before)
    used, start = pool.used, everything(pool, kv)
    branches = kv.fork(2)
    assert pool.used == used, "a fork takes no pages"
    assert node.users == 3
    whole = [kv, *branches]
    for n, each in enumerate(whole):
        assert begins_with(everything(pool, each), start)
        assert each.length == before
        run(pool, each, 2 + n)
    for n, each in enumerate(whole):
        now = everything(pool, each)
        assert begins_with(now, start)
        assert [len(k) for k, _, _ in now] == [len(k) + 2 + n for k, _, _ in start]
        assert now[0][2][-1] == manifest.next_position + before + 2 + n - 1
    again = branches[1].fork(1)[0]
    assert begins_with(everything(pool, again), everything(pool, branches[1]))
    run(pool, again, 1)
    for each in (kv, again, branches[0]):
        each.close()
    left = everything(pool, branches[1])
    assert begins_with(left, start)
    assert not any(k.isnan().any() for k, _, _ in left)
    branches[1].close()
    assert node.users == 0
    assert pool.used == node.pages.size
    pool.assert_empty()


@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("forked", [False, True])
def test_what_is_swapped_out_comes_back_bit_for_bit(tokens: int, forked: bool) -> None:
    pool = SmallPool()
    kv = pool.turn()
    run(pool, kv, tokens)
    if forked:
        kv.fork(1)[0].close()
        run(pool, kv, 3)
        tokens += 3
    before, cache = everything(pool, kv), kv.own(tokens)
    assert (cache.num_tokens, cache.next_position) == (tokens, tokens)
    kv.close()
    pool.pages.keys.fill_(torch.nan)
    pool.pages.values.fill_(torch.nan)
    other = pool.turn(tokens=1)  # other pages than before
    back = pool.turn(tokens=tokens + 1)
    back.restore(cache)
    assert back.length == tokens
    assert begins_with(everything(pool, back), before)
    run(pool, back, 2)
    assert begins_with(everything(pool, back), before)
    other.close()
    back.close()
    pool.assert_empty()


@pytest.mark.parametrize(("run_tokens", "kept"), [(9, 9), (9, 8), (9, 5), (9, 1), (8, 8)])
def test_a_published_turn_hands_its_pages_over(run_tokens: int, kept: int) -> None:
    """A stop string may cut off tokens that have run: their pages come back."""
    pool = SmallPool()
    kv = pool.turn(tokens=run_tokens + 5)
    run(pool, kv, run_tokens)
    right, pages = kv.own(kept), kv.keep_own(kept)
    assert pages is not None
    assert pages.shape == (2, 3, -(-kept // PAGE))
    kv.close()
    assert pool.used == pages.size
    slots = torch.from_numpy(pages.astype(np.int64))[..., None] * PAGE + torch.arange(PAGE)
    for layer in range(2):
        rows = slots[layer].flatten(1)[:, :kept].flatten()
        held = right.layers[layer]
        assert [t.tolist() for t in pool.pages.read(rows)] == [
            t.tolist() for t in (held.keys, held.values, held.positions)
        ]
    pool.pages.give_back(pages)
    pool.assert_empty()


def test_shared_pages_are_handed_to_nobody() -> None:
    pool = SmallPool()
    kv = pool.turn()
    run(pool, kv, 5)
    (branch,) = kv.fork(1)
    run(pool, kv, 1)
    before = everything(pool, branch)
    assert kv.keep_own(6) is None
    assert branch.keep_own(5) is None
    kv.close()
    assert begins_with(everything(pool, branch), before)
    branch.close()
    pool.assert_empty()


def test_closing_twice_gives_back_once() -> None:
    pool = SmallPool()
    node = pool.hold(*pool.publish(LENS, TIERS))
    pool.residents.use(node)
    kv = pool.turn([NodeView(node, "1")], tokens=5)
    kv.close()
    kv.close()
    assert node.users == 1
    pool.residents.leave(node)
    pool.assert_empty()
