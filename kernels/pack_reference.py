"""Plain torch truth of ranking and packing kept entries: any device."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.kernels.finite import all_finite


def tier_ranks(by_score: Tensor, admitted: Tensor, tiers: int) -> Tensor:  # noqa: ARG001
    """Return the order by (tier, place in `by_score`), like by_score; see `ops`."""
    in_order = admitted.gather(-1, by_score)
    if in_order.is_cpu:
        # numpy sorts bytes by radix: 4 to 35 times as fast as torch's stable sort.
        places = torch.from_numpy(in_order.numpy().argsort(axis=-1, kind="stable"))
    else:
        places = in_order.sort(dim=-1, stable=True).indices
    return by_score.gather(-1, places)


def pack(
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor,
    first_position: int,
    tier_lens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (keys [Σ, D], values, positions int32 [Σ], finite bool []); see `ops`."""
    keys, values = keys.detach(), values.detach()
    runs = pack_runs(cu_seqlens, tier_lens).tolist()
    total, dim = sum(run[3] for run in runs), keys.shape[2]
    out_keys, out_values = (x.new_empty(total, dim) for x in (keys, values))
    positions = indices.new_empty(total, dtype=torch.int32)
    for head, source, target, count in runs:
        rows, out = indices[source : source + count], slice(target, target + count)
        torch.index_select(keys[head], 0, rows, out=out_keys[out])
        torch.index_select(values[head], 0, rows, out=out_values[out])
        positions[out] = rows + first_position
    return out_keys, out_values, positions, all_finite(out_keys) & all_finite(out_values)


def pack_runs(cu_seqlens: Tensor, tier_lens: Tensor | None) -> Tensor:
    """Return the runs of consecutive output rows that come from one head, in order.

    Returns:
        int64 [R, 4] on the CPU: head, first place in the head-major order, first row of
        the output, rows (0 where a tier adds nothing).
    """
    cu = cu_seqlens.long()
    ends = cu.diff()[None] if tier_lens is None else tier_lens.cpu().long()
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    counts = (ends - begins).flatten()
    heads = torch.arange(ends.shape[1]).repeat(ends.shape[0])
    return torch.stack([heads, (cu[:-1] + begins).flatten(), counts.cumsum(0) - counts, counts], 1)
