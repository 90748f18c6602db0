"""Quantized nodes in the pool: groups in pages, attended to as their entries would be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pool_world import FLOOR, LARGE, RAW, TIERS, Known, Tokens, World, naive, step
from small_pool import SALT, SmallPool, spec_of

from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.kernels.quantized_reference import groups_per_page as groups_of_kernel
from criticalkv.services.decode import batch
from criticalkv.services.decode.places import groups_per_page
from criticalkv.services.decode.resident import NodeView, copied_chain
from criticalkv.shared.chain import ChainLoader
from criticalkv.shared.errors import NodeMissingError, PoolLimitError

CODECS = ("int8", "int4")
LENS = LARGE[0]
MIXED = (RAW, ("int8", "int4", "raw"), ("int4", "raw", "int4"), ("raw", "int8", "int8"))
PAGE = 64


def groups(tiers: list[list[list[int]]]) -> int:
    """Groups of a tier table, counted one by one."""
    count = 0
    for layer in range(len(tiers[0])):
        for head in range(len(tiers[0][0])):
            done = 0
            for tier in tiers:
                while done < tier[layer][head]:
                    done = min(done + 32, tier[layer][head])
                    count += 1
    return count


# Keys and values of 8 channels, fp32: a page has 32 bytes per slot for each. A group has
# 288 + 512 bytes of int8, 160 + 384 of int4.
@pytest.mark.parametrize(
    ("codec", "page_size", "per_page"),
    [("int8", 16, 1), ("int8", 47, 2), ("int8", 48, 3), ("int4", 12, 1), ("int4", 64, 5)],
)
def test_groups_share_pages_whatever_their_heads(codec: str, page_size: int, per_page: int) -> None:
    pool = SmallPool(page_size=page_size)
    manifest, cache = pool.publish(LENS, TIERS, codec=codec)
    assert groups_per_page(manifest, page_size) == per_page
    memory = (pool.pages.key_bytes, pool.pages.value_bytes)
    assert groups_of_kernel(*memory, GroupLayout(int(codec[3:]), 8)) == per_page
    for tier, lens in (("0.2", LENS[:1]), ("1", LENS)):
        node = pool.hold(manifest, cache, tier)
        assert pool.used == node.pages.size == -(-groups(lens) // per_page)
        pool.residents.leave(node)
        pool.assert_empty()


# A page has 256 bytes per slot; a group at most 4,608 of int8, 2,688 of int4.
@pytest.mark.parametrize(("codec", "counts"), [("int8", (3, 7)), ("int4", (6, 12))])
def test_larger_pages_waste_less_of_a_large_model(codec: str, counts: tuple[int, int]) -> None:
    pool = SmallPool(page_size=64, spec=spec_of(dim=128, dtype="bfloat16"), total=20)
    manifest, _ = pool.publish(LENS, TIERS, codec=codec)
    assert tuple(groups_per_page(manifest, size) for size in (64, 128)) == counts


@pytest.mark.parametrize(("codec", "least"), [("int8", 16), ("int4", 12)])
def test_a_page_that_holds_no_group_is_refused_before_anything_is_read(
    codec: str, least: int
) -> None:
    small = SmallPool(page_size=least - 1)
    manifest, _ = small.publish(LENS, TIERS, codec=codec)
    with pytest.raises(PoolLimitError, match=f"{codec}: set decode.page_size to {least} or more"):
        small.opener.measure(manifest.node_id, SALT, ("1",), lambda: None)
    fits = SmallPool(page_size=least, store=small.store)
    assert fits.opener.measure(manifest.node_id, SALT, ("1",), lambda: None).view == ("1",)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_pulled_is_what_the_store_has(codec: str) -> None:
    """At the tier that is held and below, and by stepwise turns, which read a copy."""
    pool = SmallPool(page_size=PAGE)
    manifest, _ = pool.publish(LENS, TIERS, codec=codec)
    chain = pool.opener.measure(manifest.node_id, SALT, ("1",), lambda: None)
    opened = pool.opener.open(chain, 0)
    assert opened is not None
    assert pool.opener.pages_at_least(chain) == pool.used == opened.to_pull[0].pages.size
    assert opened.bytes_to_pull == manifest.tier_bytes()[1]
    pool.opener.pull(opened.to_pull, lambda: None)
    loader = ChainLoader(pool.store, pool.spec)
    for tier in TIERS:
        (right,) = loader.load(manifest.node_id, SALT, (tier,)).nodes
        (copy,) = copied_chain(pool.pages, [NodeView(opened.views[0].node, tier)]).nodes
        for a, b in zip(copy.cache.layers, right.cache.layers, strict=True):
            assert a.keys.equal(b.keys)
            assert a.values.equal(b.values)
            assert a.positions.equal(b.positions)
            assert a.cu_seqlens.equal(b.cu_seqlens)
    pool.residents.leave(opened.views[0].node)
    pool.assert_empty()


def test_other_groups_than_were_measured_are_a_miss() -> None:
    """Even of as many entries: their groups would begin elsewhere."""
    pool = SmallPool(page_size=PAGE)
    manifest, _ = pool.publish(LENS, TIERS, codec="int8")
    opened = pool.opener.open(pool.opener.measure(manifest.node_id, SALT, ("1",), lambda: None), 0)
    assert opened is not None
    pool.store.delete(manifest.node_id)  # type: ignore[attr-defined]
    again, _ = pool.publish([[[2, 0, 40], [33, 1, 0]], LENS[1]], TIERS, codec="int8")
    assert again.node_id == manifest.node_id
    with pytest.raises(NodeMissingError, match="replaced"):
        pool.opener.pull(opened.to_pull, lambda: None)
    pool.residents.leave(opened.views[0].node)
    pool.assert_empty()


def test_quantized_nodes_take_no_place_among_a_turns_raw_pages() -> None:
    world = World(MIXED, LARGE, PAGE)
    known = world.sequence("0.2", "1", chain=1)
    assert known.kv.tables.shape[2] == 0
    found = {layout.bits: fills for layout, (_, fills) in known.kv.groups.items()}
    assert sorted(found) == [4, 8]
    assert found[8].sum(2).tolist() == LENS[0]
    assert found[4].sum(2).tolist() == LARGE[1][0]
    assert set(np.unique(found[8]).tolist()) == {0, 1, 8, 32}
    world.close([known])


def mixed(world: World) -> list[Known]:
    """Sequences over every chain, at both tiers and at various depths."""
    views = (
        (0, ("1", "1")),
        (1, ("0.2", "1", "1")),
        (1, ("1",)),
        (2, ("1", "1", "1")),
        (2, ("0.2",)),
        (3, ("0.2", "1", "1")),
        (0, ()),
    )
    return [world.sequence(*tiers, chain=chain) for chain, tiers in views]


STEPS = ((2, 3, 1, 5, 1, 2, 4), (1, 1, 2, 1, 1, 1, 1))


@pytest.mark.parametrize("window", [None, 37])
def test_every_row_is_what_the_dequantized_entries_give(window: int | None) -> None:
    world = World(MIXED, LARGE, PAGE)
    known = mixed(world)
    for counts in STEPS:
        members = [(k, Tokens.random(world, n)) for k, n in zip(known, counts, strict=True)]
        for out, member in zip(step(world, members, window), members, strict=True):
            torch.testing.assert_close(out.double(), naive(*member, window), atol=FLOOR, rtol=0)
    (branch,) = known[1].kv.fork(1)
    forked = [known[1], Known(branch, known[1].caches, list(known[1].own))]
    members = [(k, Tokens.random(world, 1)) for k in forked]
    for out, member in zip(step(world, members, window), members, strict=True):
        torch.testing.assert_close(out.double(), naive(*member, window), atol=FLOOR, rtol=0)
    world.close([*known, forked[1]])


def test_half_the_bits_stay_half_the_bits() -> None:
    """In bf16 a row is rounded twice: what the pages give, then what is merged."""
    world = World(MIXED, LARGE, PAGE, "bfloat16")
    known = mixed(world)
    members = [(k, Tokens.random(world, n)) for k, n in zip(known, STEPS[0], strict=True)]
    for out, member in zip(step(world, members), members, strict=True):
        assert out.dtype == torch.bfloat16
        right = naive(*member)
        error = (out.double() - right).abs().max()
        assert error <= 2 * (right.bfloat16().double() - right).abs().max()
    world.close(known)


@pytest.mark.parametrize("alone", range(7))
@pytest.mark.parametrize("window", [None, 37])
def test_a_row_does_not_depend_on_its_neighbours_codecs(alone: int, window: int | None) -> None:
    """Those over raw nodes get the bits of a batch in which nothing is quantized."""
    together, apart = World(MIXED, LARGE, PAGE), World(MIXED, LARGE, PAGE)
    one, all_of_them = mixed(apart)[alone], mixed(together)
    for counts in STEPS:
        members = [
            (k, Tokens.random(together, n)) for k, n in zip(all_of_them, counts, strict=True)
        ]
        outs = step(together, members, window)
        (out,) = step(apart, [(one, members[alone][1])], window)
        assert out.equal(outs[alone])


def test_a_batch_over_raw_nodes_asks_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing is quantized")

    monkeypatch.setattr(batch.ops, "quantized_attention", refuse)
    monkeypatch.setattr(batch.ops, "merge", refuse)
    world = World(MIXED, LARGE, PAGE)
    known = [world.sequence("1", "1"), world.sequence()]
    step(world, [(k, Tokens.random(world, 2)) for k in known])
