"""GPU kernels: right by the 2× rule, then GB/s against what a copy reaches.

Knows `criticalkv.kernels`, torch and triton only. Started by gpu.sh.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.kernels import ops, reference

Q_HEADS, KV_HEADS, DIM = 32, 8, 128  # Llama-3.1-8B
CONTEXT, KEPT, PAGE = 32768, 0.2, 64
BATCHES = (1, 4, 16, 64)
REPEATS = 7


def main(path: str) -> None:
    """Measure and write the report; fail if a kernel is wrong."""
    torch.manual_seed(0)
    checks = [
        check(dtype, queries) for dtype in (torch.float16, torch.bfloat16) for queries in (1, 7)
    ]
    ceiling = copy_ceiling()
    report = {
        "benchmark": "gpu",
        "environment": environment(),
        "checks": checks,
        "copy_gb_s": ceiling,
        "decode_attention": [decode_attention(batch, ceiling) for batch in BATCHES],
    }
    Path(path).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    if not all(item["right"] for item in checks):
        sys.exit("a kernel breaks the 2x rule")


def batch_of(lens: Tensor, dtype: torch.dtype, queries: int) -> dict[str, Any]:
    """Random pages for heads of these lengths, int64 [S, KV_HEADS]; shuffled in memory."""
    counts = (lens + PAGE - 1) // PAGE
    total, width = int(counts.sum()), int(counts.max())
    order = torch.randperm(total, dtype=torch.int32)
    tables = torch.zeros(*lens.shape, width, dtype=torch.int32)
    used = torch.arange(width) < counts[..., None]
    tables[used] = order
    fills = (lens[..., None] - PAGE * torch.arange(width)).clamp(0, PAGE).to(torch.int32)
    pages = [torch.randn(total, PAGE, DIM, device="cuda", dtype=dtype) for _ in range(2)]
    sequences = lens.shape[0]
    query = torch.randn(Q_HEADS, sequences * queries, DIM, device="cuda", dtype=dtype)
    return {
        "q": query,
        "key_pages": pages[0],
        "value_pages": pages[1],
        "tables": tables.cuda(),
        "fills": fills.cuda(),
        "query_cu": torch.arange(sequences + 1, dtype=torch.int32) * queries,
    }


def ragged_lens(sequences: int, mean: float) -> Tensor:
    """Lengths of gamma(2) distribution, no multiples of a page."""
    drawn = torch.distributions.Gamma(2.0, 2.0 / mean).sample((sequences, KV_HEADS))
    return drawn.long().clamp(8, CONTEXT)


def check(dtype: torch.dtype, queries: int) -> dict[str, Any]:
    """Error against fp32 at most twice that of torch in the same dtype."""
    call = batch_of(ragged_lens(4, 900), dtype, queries)
    scaling = DIM**-0.5
    ours, _ = ops.paged_attention(**call, scaling=scaling)
    rest = {"scaling": scaling, "causal": True, "window": None, "position_pages": None}
    rest |= {"query_positions": None, "return_lse": False}
    wide = {k: v.float() if v.is_floating_point() else v for k, v in call.items()}
    truth, _ = reference.paged_attention(**wide, **rest)
    error, plain = (float((out.float() - truth).abs().max()) for out in (ours, _torch_like(call)))
    # Rounding the exact result already costs half a unit in the last place.
    floor = float(truth.abs().max()) * torch.finfo(dtype).eps
    return {
        "dtype": str(dtype),
        "queries": queries,
        "error": error,
        "torch_error": plain,
        "right": error <= 2 * max(plain, floor),
    }


def _torch_like(call: dict[str, Any]) -> Tensor:
    """The same by torch's own attention in the same dtype, a head at a time."""
    q, cu = call["q"], call["query_cu"].tolist()
    group, out = Q_HEADS // KV_HEADS, torch.empty_like(call["q"])
    slots = torch.arange(PAGE, device="cuda")
    for s in range(len(cu) - 1):
        for h in range(KV_HEADS):
            used = slots < call["fills"][s, h][:, None]
            rows = (call["tables"][s, h][:, None].long() * PAGE + slots)[used]
            keys, values = (call[name].flatten(0, 1)[rows] for name in ("key_pages", "value_pages"))
            count = cu[s + 1] - cu[s]
            order = torch.arange(keys.shape[0], device="cuda")
            seen = order <= keys.shape[0] - count + torch.arange(count, device="cuda")[:, None]
            heads = slice(h * group, (h + 1) * group)
            part = q[heads, cu[s] : cu[s + 1]]
            wide = (t.expand(group, -1, -1) for t in (keys, values))
            out[heads, cu[s] : cu[s + 1]] = F.scaled_dot_product_attention(
                part[None], *(t[None] for t in wide), attn_mask=seen[None, None]
            )[0]
    return out


def decode_attention(batch: int, ceiling: float) -> dict[str, Any]:
    """One layer of a decode step over contexts of 32K tokens at tier 0.2, and in full."""
    call = batch_of(ragged_lens(batch, CONTEXT * KEPT), torch.bfloat16, 1)
    kept = int(call["fills"].sum())
    shape = (batch, KV_HEADS, CONTEXT, DIM)
    full = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    query = torch.randn(batch, Q_HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    seconds = alternate(
        {
            "ours": lambda: ops.paged_attention(**call, scaling=DIM**-0.5),
            "sdpa": lambda: F.scaled_dot_product_attention(query, *full, enable_gqa=True),
        }
    )
    moved = kept * DIM * 2 * 2
    return {
        "batch": batch,
        "entries": kept,
        "ours_us": 1e6 * seconds["ours"],
        "sdpa_full_us": 1e6 * seconds["sdpa"],
        "speedup": seconds["sdpa"] / seconds["ours"],
        "gb_s": moved / seconds["ours"] / 1e9,
        "of_copy": moved / seconds["ours"] / 1e9 / ceiling,
    }


def copy_ceiling() -> float:
    """GB/s, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = alternate({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * source.numel() / seconds / 1e9


def alternate(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each call, taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(REPEATS):
        for name, call in calls.items():
            samples[name].append(timed(call))
    return {name: statistics.median(values) for name, values in samples.items()}


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call, the mean over a run long enough for the clock."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20 / 1e3


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, time."""
    import triton

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip() or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    main(sys.argv[1])
