"""Quantized nodes in the store: read by either path, at every tier, and shrunk by exact bytes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import redis
import torch
import xxhash
from coded_nodes import CodedNode, coded_node
from store_rig import held_bytes, total

from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.shared.cache.quantized import quantize_layer
from criticalkv.shared.chain import read_groups, read_layers
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import CorruptNodeError, InvalidRequestError
from criticalkv.shared.store_client import StoreClient

TABLES = torch.tensor(
    [
        [[3, 0, 32], [40, 0, 33], [41, 7, 100]],
        [[1, 1, 1], [64, 1, 2], [65, 1, 3]],
    ]
)
GRACE_S = 0.3


def put(store: StoreClient, node: CodedNode) -> Any:
    with store.open_put(node.node_id, node.manifest.attempt) as writer:
        for payload in node.payloads:
            writer.send(payload)
        return writer.commit(node.manifest, node.record)


@pytest.mark.parametrize(("codec", "bits"), [("int8", 8), ("int4", 4)])
def test_either_path_reads_the_groups_of_each_tier(
    each_path: StoreClient, codec: str, bits: int
) -> None:
    node = coded_node(TABLES, 6, codec, "bfloat16", seed=bits)
    result = put(each_path, node)
    assert (result.published, result.stored_bytes) == (True, node.nbytes)
    stat = each_path.stat([node.node_id])[0]
    assert list(stat.tier_bytes) == node.manifest.tier_bytes()
    assert list(stat.tier_entries) == node.manifest.tier_entries()
    layout = GroupLayout(bits, 6)
    for t, tier in enumerate(node.manifest.tiers):
        with each_path.open_get(node.node_id, tier=tier) as reader:
            got = list(read_groups(reader))
        with each_path.open_get(node.node_id, tier=tier) as reader:
            layers = list(read_layers(reader))
        counts = node.manifest.group_counts[: t + 1].sum(0)
        for i, layer in enumerate(node.layers):
            expected = quantize_layer(layer, TABLES[i], layout).prefix(counts[i].tolist())
            assert torch.equal(got[i].key_groups, expected.key_groups)
            assert torch.equal(got[i].value_groups, expected.value_groups)
            assert torch.equal(layers[i].keys, expected.ragged(torch.bfloat16).keys)


def test_a_large_node_reads_back(each_path: StoreClient) -> None:
    node = coded_node(torch.tensor([[[9000, 11], [20_000, 12]]]), 64, "int8", seed=5)
    assert len(node.payloads) > 2
    put(each_path, node)
    with each_path.open_get(node.node_id) as reader:
        assert {i: bytes(p) for i, p in reader} == dict(enumerate(node.payloads))


def test_a_manifest_of_cut_groups_is_refused_at_once(each_path: StoreClient) -> None:
    node = coded_node(TABLES, 6, seed=11)
    first, *others = node.manifest.segments
    wrong = node.manifest.model_copy(
        update={"segments": (replace(first, groups=first.groups + 1), *others)}
    )
    cut = CodedNode(wrong, node.record, node.layers, node.payloads)
    with pytest.raises(InvalidRequestError, match="groups"):
        put(each_path, cut)


def test_an_impossible_scale_is_refused_though_its_checksum_fits(each_path: StoreClient) -> None:
    node = coded_node(TABLES, 6, seed=12)
    payload = bytearray(node.payloads[0])
    payload[1] = 0x7E  # the high byte of the first scale: NaN
    first, *others = node.manifest.segments
    right = replace(first, checksum=xxhash.xxh3_64_intdigest(payload))
    manifest = node.manifest.model_copy(update={"segments": (right, *others)})
    put(
        each_path,
        CodedNode(manifest, node.record, node.layers, [bytes(payload), *node.payloads[1:]]),
    )
    for read in (read_groups, read_layers):
        with (
            each_path.open_get(node.node_id) as reader,
            pytest.raises(CorruptNodeError, match="impossible"),
        ):
            next(iter(read(reader)))


async def test_shrinking_frees_exactly_what_a_tier_added(rigs: Any, emptied: redis.Redis) -> None:
    rig = rigs(StoreConfig(read_deadline_s=GRACE_S, lease_ttl_s=2, shrink_floor="0.1"), 1 << 30)
    node = coded_node(TABLES, 6, "int4", seed=13)
    assert (await rig.put(node)).published
    manifest, sizes = node.manifest, node.manifest.tier_bytes()
    assert total(emptied) == held_bytes(emptied) == node.nbytes == sizes[-1]
    for at in (1, 0):
        added = sizes[at + 1] - sizes[at]
        assert manifest.added_bytes(at + 1) == added
        assert await rig.shrinker.shrink(node.node_id) == ("shrunk", added)
        assert (await rig.books.state()).freeing == added
        await asyncio.sleep(GRACE_S)
        await rig.janitor.sweep()
        assert total(emptied) == held_bytes(emptied) == sizes[at]
        header, payloads = await rig.get(node.node_id)
        assert header.tier == manifest.tiers[at]
        assert payloads == dict(node.read(manifest.tiers[at]))
    assert await rig.shrinker.shrink(node.node_id) == ("floor", 0)
