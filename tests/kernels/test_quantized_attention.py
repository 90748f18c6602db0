"""Attention over quantized groups: the reference and the numba kernel against fp64."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import naive_groups
import naive_pages
import pytest
import torch
from torch import Tensor

from criticalkv.kernels import (
    ops,
    quantized_attention_cpu,
    quantized_reference,
    vectors_cpu,
)

FLOOR = 2e-6
"""Absolute error allowed in fp32: entries are of order 1, sums at most a few thousand terms."""

Attention = Callable[..., tuple[Tensor, Tensor]]
PATHS: dict[str, Attention] = {
    "reference": quantized_reference.quantized_attention,
    "numba": quantized_attention_cpu.quantized_attention,
    "dispatch": ops.quantized_attention,
}


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=PATHS, ids=str)
def attention(request: pytest.FixtureRequest) -> Attention:
    return PATHS[request.param]


def check(attention: Attention, batch: naive_groups.Batch, window: int | None = None) -> None:
    out, lse = attention(*batch.arguments(), **batch.options(window))
    expected, expected_lse = naive_groups.attention(batch, window)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), expected, atol=FLOOR, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2 * FLOOR, rtol=0)


CHAINS = [
    [[3, 2, 70, 1], [1, 64, 1], [5]],  # pieces that end within a group
    [[64, 0, 0, 7, 2], [0, 9], [0, 0, 0, 0, 0, 0, 2]],  # holes in the middle and in front
    [[130, 6], [], [31, 33, 32]],  # an empty head
]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("per_page", [1, 2, 7, 12])
def test_chains_holes_and_several_queries(attention: Attention, bits: int, per_page: int) -> None:
    batch = naive_groups.batch(CHAINS, [1, 2, 6], group=3, dim=64, bits=bits, per_page=per_page)
    check(attention, batch)


@pytest.mark.parametrize(
    ("group", "dim", "bits"),
    [
        (1, 64, 4),
        (2, 80, 4),
        (4, 128, 8),
        (5, 96, 8),
        (8, 256, 4),
    ],
    ids=str,
)
def test_heads_of_every_shape(attention: Attention, group: int, dim: int, bits: int) -> None:
    rows = [[[21, 3], [40]], [[2], [17, 2]]]
    check(attention, naive_groups.batch(rows, [1, 2], group=group, dim=dim, bits=bits))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 1023, 1024, 1025, 2600])
def test_lengths_around_groups_and_chunks(attention: Attention, length: int) -> None:
    rows = [[[length], [1]]]
    check(attention, naive_groups.batch(rows, [1], group=3, dim=64, bits=8))


def test_pieces_that_fill_their_groups_badly_end_chunks_anywhere(attention: Attention) -> None:
    rows = [[[1] * 40 + [33] * 60, [0, 5] * 50 + [1023, 1]]]
    check(attention, naive_groups.batch(rows, [2], group=3, dim=64, bits=4, per_page=12))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("window", [300, 1000, 2000])
def test_a_window_goes_by_positions(attention: Attention, window: int, bits: int) -> None:
    batch = naive_groups.batch(CHAINS, [1, 2, 6], group=3, dim=64, bits=bits, per_page=5)
    check(attention, batch, window)


def test_empty_heads_and_windows_that_hide_everything_give_nothing(attention: Attention) -> None:
    batch = naive_groups.batch([[[], [40, 3]], [[0], []]], [2, 3], group=3, dim=64, bits=8)
    for window in (None, 1):  # positions are below 1000, queries from there on
        out, lse = attention(*batch.arguments(), **batch.options(window))
        nothing = torch.ones(6, 5, dtype=torch.bool)
        if window is None:
            nothing[3:, :2] = False
        assert torch.equal(lse == -torch.inf, nothing)
        assert not out[nothing].any()


def test_large_logits(attention: Attention) -> None:
    batch = naive_groups.batch([[[300], [41]]], [1], group=3, dim=64, bits=8)
    batch.q.mul_(40)  # logits of hundreds: most weights vanish
    out, lse = attention(*batch.arguments(), **batch.options())
    expected, expected_lse = naive_groups.attention(batch)
    # fp32 rounds logits of hundreds by 1e-5, and weights by as much.
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=0, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_quantize_wrote_is_attended_to(attention: Attention, bits: int) -> None:
    batch = naive_groups.batch([[[0], [0]]], [2], group=3, dim=64, bits=bits, per_page=1)
    keys, values = torch.randn(2, 50, 64).unbind()
    starts, fills = torch.tensor([0, 32]), torch.tensor([32, 18])
    positions = torch.arange(50)
    batch.key_pages, batch.value_pages = quantized_reference.quantize(
        keys, values, positions, starts, fills, bits
    )
    batch.tables = torch.tensor([[[0, 1], [1, 0]]], dtype=torch.int32)
    batch.fills = fills.int()[batch.tables.long()]
    check(attention, batch)
    check(attention, batch, 970)  # hides positions up to 30


def test_nan_in_a_group_is_not_hidden(attention: Attention) -> None:
    batch = naive_groups.batch([[[30], [40], [1500]]], [1], group=3, dim=64, bits=8, per_page=1)
    clean, clean_lse = attention(*batch.arguments(), **batch.options())
    at, nan = batch.layout.affine_at, torch.tensor([torch.nan]).half().view(torch.uint8)
    batch.key_pages[batch.tables[0, 0, 0], at : at + 2] = nan
    batch.value_pages[batch.tables[0, 2, 40], at : at + 2] = nan
    out, lse = attention(*batch.arguments(), **batch.options())
    assert out[:3].isnan().all()
    assert lse[:3].isnan().all()
    assert torch.equal(out[3:6], clean[3:6])
    assert out[6:].isnan().all()
    assert torch.equal(lse[3:], clean_lse[3:])


def test_nan_in_a_query_stays_there(attention: Attention) -> None:
    batch = naive_groups.batch([[[30], [40]]], [2], group=3, dim=64, bits=8)
    batch.q[1, 1] = torch.nan
    out, lse = attention(*batch.arguments(), **batch.options())
    hit = torch.zeros(6, 2, dtype=torch.bool)
    hit[1, 1] = True
    assert torch.equal(out.isnan().any(-1), hit)
    assert torch.equal(lse.isnan(), hit)


ROWS_OF_8 = [[[700 + 400 * i, 5], [90 * i, 2], [2000 - 250 * i]] for i in range(8)]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_else_is_in_the_batch_changes_no_bit(threads: int) -> None:
    torch.set_num_threads(threads)
    queries = [1, 2, 1, 1, 3, 1, 2, 1]
    batch = naive_groups.batch(ROWS_OF_8, queries, group=3, dim=64, bits=8, per_page=7)
    together, lse = ops.quantized_attention(*batch.arguments(), **batch.options())
    for s, (a, b) in enumerate(zip(batch.query_cu, batch.query_cu[1:], strict=False)):
        for more in (0, 70):
            one = batch.only(s, more)
            alone, own_lse = ops.quantized_attention(*one.arguments(), **one.options())
            assert torch.equal(alone, together[:, a:b])
            assert torch.equal(own_lse, lse[:, a:b])


def test_many_and_few_queries_in_one_batch() -> None:
    many = 2 * (quantized_attention_cpu.MAX_ROWS // 3) + 1  # cut into three
    rows = [[[20], [9]], [[40], [31]], [[30], [30]]]
    batch = naive_groups.batch(rows, [1, many, 2], group=3, dim=64, bits=8)
    check(ops.quantized_attention, batch)
    check(ops.quantized_attention, batch, 800)


def test_merged_with_raw_pages_it_is_attention_to_both() -> None:
    quantized = naive_groups.batch(CHAINS, [1, 2, 6], group=3, dim=64, bits=8)
    rows = [[[4, 1], [1], [7]], [[2], [3], [2]], [[6], [6], [9]]]
    raw = naive_pages.batch(rows, [1, 2, 6], group=3, dim=64, page_size=16)
    raw.q = quantized.q
    parts = [
        ops.quantized_attention(*quantized.arguments(), **quantized.options()),
        ops.paged_attention(*raw.arguments(), **raw.options(None)),
    ]
    (out_a, lse_a), (out_b, lse_b) = naive_groups.attention(quantized), naive_pages.attention(raw)
    total = torch.logaddexp(lse_a, lse_b)
    expected = (lse_a - total).exp()[..., None] * out_a + (lse_b - total).exp()[..., None] * out_b
    merged = ops.merge(parts)
    torch.testing.assert_close(merged.double(), expected, atol=FLOOR, rtol=0)
    empty = slice(3, 6), slice(3, None)  # the empty head: what the pages gave, to the bit
    assert torch.equal(merged[empty], parts[1][0][empty])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_goes_to_the_reference(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_attention_cpu, "quantized_attention", None)
    batch = naive_groups.batch(CHAINS, [1, 2, 6], group=3, dim=64, bits=8, dtype=dtype)
    check(ops.quantized_attention, batch)  # arithmetic and results are fp32


def test_gradients_and_other_layouts_go_to_the_reference() -> None:
    batch = naive_groups.batch([[[4], [2]]], [1], group=3, dim=64, bits=8)
    keys, values = batch.key_pages, batch.value_pages
    applies = quantized_attention_cpu.applies
    assert applies(batch.q, keys, values)
    assert not applies(batch.q[..., :12], keys, values)
    assert not applies(batch.q, keys[:, :-2].contiguous(), values)  # no whole words
    assert not applies(batch.q, keys, values[:, 4:])  # not in one piece
    assert not applies(batch.q.clone().requires_grad_(), keys, values)


def test_pages_that_are_not_whole_words_go_to_the_reference() -> None:
    batch = naive_groups.batch(CHAINS, [1, 2, 6], group=3, dim=64, bits=8, spare=3)
    check(ops.quantized_attention, batch)


def test_several_threads_may_call_at_once() -> None:
    batch = naive_groups.batch([[[900], [300]]] * 2, [1, 1], group=3, dim=64, bits=8)

    def call(_: int) -> Tensor:
        torch.set_num_threads(2)
        return ops.quantized_attention(*batch.arguments(), **batch.options())[0]

    expected = call(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(out, expected) for out in pool.map(call, range(200)))


def test_a_kernel_that_does_not_compile_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> None:
        raise TypeError("cannot compile")

    monkeypatch.setattr(quantized_attention_cpu, "warm_up", fail)
    ops._on_cpu.cache_clear()
    batch = naive_groups.batch([[[4], [2]]], [1], group=3, dim=64, bits=8)
    with caplog.at_level(logging.WARNING):
        check(ops.quantized_attention, batch)
    ops._on_cpu.cache_clear()
    assert [r.getMessage() for r in caplog.records] == [
        "quantized_attention runs in plain torch, much slower"
    ]


def test_the_machine_code_is_kept_on_disk_until_what_it_calls_changes() -> None:
    quantized_attention_cpu.warm_up(64, 3, 8)
    code = (
        "from criticalkv.kernels import quantized_attention_cpu as cpu; run = cpu._run;"
        "cpu.warm_up(64, 3, 8); file = run._cache._cache_file;"
        "print(sum(run.stats.cache_hits.values()), sum(run.stats.cache_misses.values()));"
        "print(len(file._load_index()) > 0); file._source_stamp = b'changed';"
        "print(len(file._load_index()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0", "True", "0"]


def test_a_change_of_what_a_kernel_calls_outdates_its_machine_code(tmp_path: Path) -> None:
    source = Path(vectors_cpu.__file__).parent
    for path in source.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert vectors_cpu.stamp(source) == vectors_cpu.stamp(tmp_path)
    with (tmp_path / "attention_cpu.py").open("a") as file:
        file.write("# changed")
    stamp = quantized_attention_cpu._run._cache._cache_file._source_stamp
    assert stamp == vectors_cpu.stamp(source) != vectors_cpu.stamp(tmp_path)


def test_a_page_holds_at_least_a_group() -> None:
    batch = naive_groups.batch([[[4], [2]]], [1], group=3, dim=64, bits=8, per_page=1, spare=0)
    batch.key_pages = batch.key_pages[:, :-4].contiguous()
    for attention in PATHS.values():
        with pytest.raises(ValueError, match="smaller than a group"):
            attention(*batch.arguments(), **batch.options())


def test_a_gpu_gets_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from criticalkv.kernels import quantized_attention_gpu

    batch = naive_groups.batch([[[4], [2]]], [1], group=3, dim=64, bits=8)
    q = SimpleNamespace(shape=batch.q.shape, is_cuda=True)
    monkeypatch.setattr(quantized_attention_gpu, "quantized_attention", lambda q, *_, **__: q)
    assert ops.quantized_attention(q, *batch.arguments()[1:], **batch.options()) is q
