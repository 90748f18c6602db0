"""Payloads that may not be written to, as they come from the network, are read in place."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from criticalkv.shared.cache import wire
from criticalkv.shared.cache.manifest import Manifest, Segment
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.wire import TORCH_DTYPE, LayerAssembler, pack_layer
from criticalkv.shared.identity import POLICY_DENSE, Identity, tokens_digest

DIGEST = hashlib.sha256(b"x").hexdigest()
LENS = torch.tensor([[2, 0, 1], [7, 3, 4]])
DIM = 6


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """Every time, not once per process as torch warns by default."""
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(False)


def packed(dtype: str, lens: torch.Tensor) -> tuple[RaggedLayer, Manifest, list[bytes]]:
    rows = int(lens[-1].sum())
    keys = torch.randn(rows, DIM).to(TORCH_DTYPE[dtype])
    layer = RaggedLayer(
        keys, -keys, torch.arange(rows, dtype=torch.int32), cu_seqlens_of(lens[-1].tolist())
    )
    pairs: list[tuple[Segment, bytearray]] = list(pack_layer(0, layer, lens))
    identity = Identity(
        model_digest=DIGEST,
        tokenizer_digest=DIGEST,
        dtype=dtype,
        policy=POLICY_DENSE,
        salt=DIGEST,
        tokens=tokens_digest(range(20)),
    )
    manifest = Manifest(
        identity=identity,
        attempt="ab" * 8,
        num_tokens=20,
        next_position=20,
        num_layers=1,
        num_kv_heads=lens.shape[1],
        head_dim=DIM,
        tiers=("0.1", "1"),
        prefill_ms=1.0,
        tier_lens=tuple((tuple(row),) for row in lens.tolist()),
        segments=tuple(segment for segment, _ in pairs),
    )
    return layer, manifest, [bytes(payload) for _, payload in pairs]


@pytest.mark.parametrize("dtype", TORCH_DTYPE)
@pytest.mark.parametrize("lens", [LENS, torch.zeros_like(LENS)], ids=["some", "none"])
def test_read_only_payloads(dtype: str, lens: torch.Tensor) -> None:
    layer, manifest, payloads = packed(dtype, lens)
    assembler = LayerAssembler(manifest, 0, "1")
    for index, payload in enumerate(payloads):
        assembler.add(index, memoryview(payload))
    got = assembler.finish()
    assert torch.equal(got.keys, layer.keys)
    assert torch.equal(got.values, layer.values)
    assert torch.equal(got.positions, layer.positions)


def test_payloads_are_not_copied() -> None:
    _, manifest, payloads = packed("bfloat16", LENS)
    whole = np.frombuffer(payloads[1], np.uint8)
    pieces = wire._parse(payloads[1], manifest.segments[1].rows, manifest)
    assert [piece.shape[1] for piece in pieces] == [2 * DIM, 2 * DIM, 4]
    assert all(np.shares_memory(piece, whole) for piece in pieces)
