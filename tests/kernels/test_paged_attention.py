"""Attention over pages: the reference and the numba kernel against loops in fp64."""

from __future__ import annotations

import builtins
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import naive_pages
import pytest
import torch
from torch import Tensor

from criticalkv.kernels import ops, paged_attention_cpu, reference

FLOOR = 2e-6
"""Absolute error allowed in fp32: entries are N(0, 1), sums at most a few thousand terms."""

Attention = Callable[..., tuple[Tensor, Tensor | None]]
PATHS: dict[str, Attention] = {
    "reference": reference.paged_attention,
    "numba": paged_attention_cpu.paged_attention,
    "dispatch": ops.paged_attention,
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


def check(attention: Attention, batch: naive_pages.Batch, **options: Any) -> None:
    window, causal = options.get("window"), options.get("causal", True)
    out, lse = attention(*batch.arguments(), **batch.options(window, causal))
    expected, expected_lse = naive_pages.attention(batch, window, causal)
    assert lse is not None
    torch.testing.assert_close(out.double(), expected, atol=FLOOR, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2 * FLOOR, rtol=0)


CHAINS = [
    [[3, 2, 70, 1], [1, 64, 1], [5]],  # nodes that end within a page
    [[64, 0, 0, 7, 2], [0, 9], [0, 0, 0, 0, 0, 0, 2]],  # holes in the middle and in front
    [[130, 6], [200, 6], [6]],
]


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
@pytest.mark.parametrize("window", [None, 5, 40], ids=["full", "window 5", "window 40"])
def test_chains_holes_and_several_queries(
    attention: Attention, page_size: int, window: int | None
) -> None:
    batch = naive_pages.batch(CHAINS, [1, 2, 6], group=3, dim=64, page_size=page_size)
    check(attention, batch, window=window)


@pytest.mark.parametrize(
    ("group", "dim"), [(1, 64), (2, 80), (4, 128), (5, 16), (6, 96), (7, 64), (8, 256)], ids=str
)
def test_heads_of_every_shape(attention: Attention, group: int, dim: int) -> None:
    batch = naive_pages.batch(
        [[[21, 3], [40]], [[2], [17, 2]]], [1, 2], group=group, dim=dim, page_size=16
    )
    check(attention, batch)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 1023, 1024, 1025, 2600])
def test_lengths_around_pages_and_chunks(attention: Attention, length: int) -> None:
    batch = naive_pages.batch([[[length], [1]]], [1], group=3, dim=64, page_size=16)
    check(attention, batch)


@pytest.mark.parametrize("queries", [3, 17, 60])
def test_queries_across_a_page_boundary(attention: Attention, queries: int) -> None:
    rows = [[[90, queries], [queries]], [[1015, 3], [4]]]
    check(attention, naive_pages.batch(rows, [queries, 3], group=3, dim=64, page_size=16))


def test_queries_that_own_no_entry_see_all_and_empty_heads_give_nothing(
    attention: Attention,
) -> None:
    rows = [[[0], [7]], [[33, 2], [0, 0]], [[0], [0]]]
    batch = naive_pages.batch(rows, [2, 1, 3], group=2, dim=80, page_size=16)
    check(attention, batch, causal=False)
    out, lse = attention(*batch.arguments(), **batch.options(None, causal=False))
    assert lse is not None
    assert not out[:2, :2].any()
    assert (lse[:2, :2] == -torch.inf).all()


def test_a_window_that_hides_everything_gives_nothing(attention: Attention) -> None:
    batch = naive_pages.batch([[[40], [3]]], [2], group=2, dim=80, page_size=16)
    batch.position_pages[:] = 0
    batch.query_positions[:] = 100
    out, lse = attention(*batch.arguments(), **batch.options(5, causal=False))
    assert lse is not None
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_large_logits(attention: Attention) -> None:
    batch = naive_pages.batch([[[300], [41]]], [1], group=2, dim=80, page_size=16)
    batch.q.mul_(40)  # logits of hundreds: most weights vanish
    out, lse = attention(*batch.arguments(), **batch.options(None))
    expected, expected_lse = naive_pages.attention(batch)
    assert lse is not None
    # fp32 rounds logits of hundreds by 1e-5, and weights by as much.
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=0, rtol=1e-6)


def test_nan_in_an_entry_is_not_hidden(attention: Attention) -> None:
    batch = naive_pages.batch([[[30], [2]]], [1], group=2, dim=80, page_size=16)
    batch.key_pages[batch.tables[0, 0, 0], 3] = torch.nan
    batch.q[2:] = torch.nan
    out, lse = attention(*batch.arguments(), **batch.options(None))
    assert lse is not None
    assert out.isnan().all()
    assert lse.isnan().all()


def test_a_row_too_short_for_its_queries_is_refused(attention: Attention) -> None:
    batch = naive_pages.batch([[[4], [2]]], [2], group=2, dim=80, page_size=16)
    batch.fills[0, 1, 0] = 1
    with pytest.raises(ValueError, match="fewer entries"):
        attention(*batch.arguments(), **batch.options(None))


def test_lse_only_on_request_and_queries_in_any_layout(attention: Attention) -> None:
    batch = naive_pages.batch([[[40], [3]]], [2], group=2, dim=80, page_size=16)
    expected, _ = attention(*batch.arguments(), **batch.options(None))
    batch.q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = attention(*batch.arguments(), **batch.options(None) | {"return_lse": False})
    assert lse is None
    assert torch.equal(out, expected)


ROWS = [[[700 + 400 * i, 5], [90 * i, 2], [2000 - 250 * i]] for i in range(8)]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_else_is_in_the_batch_changes_no_bit(threads: int) -> None:
    torch.set_num_threads(threads)
    batch = naive_pages.batch(ROWS, [1, 2, 1, 1, 3, 1, 2, 1], group=3, dim=64, page_size=64)
    together, lse = ops.paged_attention(*batch.arguments(), **batch.options(None))
    assert lse is not None
    for s, (a, b) in enumerate(zip(batch.query_cu, batch.query_cu[1:], strict=False)):
        for more in (0, 70):
            one = batch.only(s, more)
            alone, own_lse = ops.paged_attention(*one.arguments(), **one.options(None))
            assert torch.equal(alone, together[:, a:b])
            assert torch.equal(own_lse, lse[:, a:b])


def test_many_and_few_queries_in_one_batch() -> None:
    rows = [[[20], [9]], [[100], [81]], [[30], [30]]]
    batch = naive_pages.batch(rows, [1, 80, 2], group=3, dim=64, page_size=16)
    assert paged_attention_cpu.MAX_ROWS < 80 * 3
    check(ops.paged_attention, batch, window=None)
    check(ops.paged_attention, batch, window=30)


@pytest.mark.parametrize("elements", [64, 1000])
def test_the_reference_in_blocks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", elements)
    batch = naive_pages.batch(CHAINS, [1, 2, 6], group=3, dim=64, page_size=16)
    check(reference.paged_attention, batch, window=None)
    check(reference.paged_attention, batch, window=40)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_goes_to_the_reference(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention_cpu, "paged_attention", None)
    batch = naive_pages.batch(CHAINS, [1, 2, 6], group=3, dim=64, page_size=16, dtype=dtype)
    out, _ = ops.paged_attention(*batch.arguments(), **batch.options(None))
    expected, _ = naive_pages.attention(batch)
    # Arithmetic is fp32: only the result is rounded.
    torch.testing.assert_close(out, expected.to(dtype), atol=FLOOR, rtol=torch.finfo(dtype).eps)


def test_gradients_and_other_layouts_go_to_the_reference() -> None:
    batch = naive_pages.batch([[[4], [2]]], [1], group=3, dim=64, page_size=16)
    pages = (batch.key_pages, batch.value_pages)
    assert paged_attention_cpu.applies(batch.q, *pages)
    assert not paged_attention_cpu.applies(batch.q[..., :12], *pages)
    assert not paged_attention_cpu.applies(batch.q.requires_grad_(), *pages)
    assert not paged_attention_cpu.applies(batch.q.detach(), *(p[..., :8] for p in pages))


CALLED_AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numba, torch
sys.path.insert(0, {support!r})
import naive_pages
from criticalkv.kernels import paged_attention_cpu
torch.set_num_threads(2)
batch = naive_pages.batch([[[900], [300]]] * 2, [1, 1], group=3, dim=64, page_size=16)
def call(_):
    torch.set_num_threads(2)
    return paged_attention_cpu.paged_attention(*batch.arguments(), **batch.options(None))[0]
expected = call(0)
with ThreadPoolExecutor(4) as pool:
    assert all(torch.equal(out, expected) for out in pool.map(call, range(400)))
print(numba.threading_layer())
"""


@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_several_threads_may_call_at_once(layer: str) -> None:
    """numba's workqueue aborts the process when two threads launch at once."""
    code = CALLED_AT_ONCE.format(support=os.path.dirname(naive_pages.__file__))
    layers = {} if layer == "default" else {"NUMBA_THREADING_LAYER": layer}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | layers | {"NUMBA_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert layer in ("default", done.stdout.strip())


def test_numbas_threads_are_torchs_and_the_callers_count_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numba

    seen = []
    run = paged_attention_cpu._run

    def spy(*arguments: Any) -> None:
        seen.append((numba.get_num_threads(), arguments[0]))
        run(*arguments)

    monkeypatch.setattr(paged_attention_cpu, "_run", spy)
    batch = naive_pages.batch([[[4], [2]]], [1], group=3, dim=64, page_size=16)

    def count(threads: int) -> None:
        torch.set_num_threads(threads)
        before = numba.get_num_threads()
        paged_attention_cpu.paged_attention(*batch.arguments(), **batch.options(None))
        assert numba.get_num_threads() == before

    with ThreadPoolExecutor(1) as pool:
        pool.submit(count, 1).result()
        pool.submit(count, 1000).result()
    most = numba.config.NUMBA_NUM_THREADS
    assert seen == [(1, 1), (most, most)]


def test_without_numba_the_reference_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def without_numba(name: str, *rest: Any, **options: Any) -> ModuleType:
        if name.split(".")[0] == "numba":
            raise ImportError("no numba")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_numba)
    monkeypatch.delitem(sys.modules, "criticalkv.kernels.paged_attention_cpu")
    monkeypatch.delattr("criticalkv.kernels.paged_attention_cpu")
    _forget()
    batch = naive_pages.batch([[[4], [2]]], [1], group=3, dim=64, page_size=16)
    with caplog.at_level(logging.WARNING):
        check(ops.paged_attention, batch)
        check(ops.paged_attention, batch)
    _forget()
    assert [r.getMessage() for r in caplog.records] == [
        "paged_attention runs in plain torch, much slower"
    ]


def _forget() -> None:
    ops._on_cpu.cache_clear()


def test_a_kernel_that_does_not_compile_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> None:
        raise TypeError("cannot compile")

    monkeypatch.setattr(paged_attention_cpu, "warm_up", fail)
    _forget()
    batch = naive_pages.batch([[[4], [2]]], [1], group=3, dim=64, page_size=16)
    check(ops.paged_attention, batch)
    _forget()
    assert len(caplog.records) == 1


def test_the_machine_code_is_kept_on_disk() -> None:
    paged_attention_cpu.warm_up(64, 3)
    code = (
        "from criticalkv.kernels import paged_attention_cpu as cpu; cpu.warm_up(64, 3);"
        "print(sum(cpu._run.stats.cache_hits.values()), sum(cpu._run.stats.cache_misses.values()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]


def test_importing_ops_loads_neither_numba_nor_triton() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import criticalkv.kernels.ops;"
        "print({'numba', 'triton'} & (set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_arguments_of_different_batches_are_refused() -> None:
    b = naive_pages.batch([[[4], [2]]], [1], group=3, dim=64, page_size=16)
    with pytest.raises(ValueError, match="different batches"):
        ops.paged_attention(*b.arguments()[:4], b.fills[..., :0], b.query_cu, scaling=1.0)
    with pytest.raises(ValueError, match="needs position_pages"):
        ops.paged_attention(*b.arguments(), scaling=1.0, window=3)
    with pytest.raises(ValueError, match="do not divide"):
        ops.paged_attention(b.q[:5], *b.arguments()[1:], scaling=1.0)
