"""Attention of one flattened step: every sequence sees its own view of the pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.services.decode.pages import Ints, Pages
from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.shared.cache.codec import BITS
from criticalkv.shared.cache.wire import TORCH_DTYPE
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.spec import ModelSpec

SequenceKV = TurnKV | StepwiseKV


@dataclass(frozen=True)
class Member:
    """What one sequence runs in a step.

    Attributes:
        kv: its KV; of a StepwiseKV no more tokens than its piece has left.
        token_ids: its next tokens.
        first_position: original position of the first of them.
        check: called while a layer of its chain is not there yet; may raise to stop.
    """

    kv: SequenceKV
    token_ids: Sequence[int]
    first_position: int
    check: Callable[[], None]


class BatchPlan:
    """AttentionPlan of a step.

    Args:
        pages: the pool's memory.
        members: at least one; those over pages before those beside them.
        device: of the model.
    """

    def __init__(self, pages: Pages, members: Sequence[Member], device: torch.device) -> None:
        self._pages = pages
        self._paged = [m for m in members if isinstance(m.kv, TurnKV)]
        self._stepwise = [m for m in members if isinstance(m.kv, StepwiseKV)]
        self._counts = [len(m.token_ids) for m in members]
        self.token_ids = torch.tensor([t for m in members for t in m.token_ids]).to(device)
        self.positions = _positions(members).to(device)
        self._waiting = [
            (view.node, m.check)
            for m in self._paged
            for view in _turn(m).views
            if not view.node.is_complete
        ]
        if self._paged:
            self._prepare(device)

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan."""
        paged = self._counts[: len(self._paged)]
        first, *rest = call.split([sum(paged), *self._counts[len(paged) :]])
        outs = [self._attend_paged(first)] if paged else []
        for member, own in zip(self._stepwise, rest, strict=True):
            outs.append(member.kv.attend(own))  # type: ignore[union-attr]
        return torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]

    def _prepare(self, device: torch.device) -> None:
        turns = [_turn(m) for m in self._paged]
        counts = self._counts[: len(turns)]
        self._query_cu = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        rows = [turn.append(n) for turn, n in zip(turns, counts, strict=True)]
        self._rows = torch.from_numpy(np.concatenate(rows, 1)).to(device)
        self._tables = torch.from_numpy(_stacked([t.tables for t in turns])).to(device)
        self._fills = torch.from_numpy(_stacked([t.fills for t in turns])).to(device)
        # In one order, so that a row's bits do not depend on its neighbours.
        layouts = sorted({x for t in turns for x in t.groups}, key=lambda layout: layout.bits)
        self._groups = {x: _stacked_groups(turns, x, device) for x in layouts}
        own = self.positions[: sum(counts)]
        self._query_positions = own.to(torch.int32)
        self._entry_positions = self._query_positions.repeat_interleave(rows[0].shape[2])

    def _attend_paged(self, call: LayerCall) -> Tensor:
        for node, check in self._waiting:
            node.wait_for(call.layer, check)
        pages, layer = self._pages, call.layer
        keys, values = (t.transpose(0, 1).flatten(0, 1) for t in (call.key, call.value))
        pages.write(self._rows[layer].flatten(), keys, values, self._entry_positions)
        out, lse = ops.paged_attention(
            call.query,
            pages.keys,
            pages.values,
            self._tables[layer],
            self._fills[layer],
            self._query_cu,
            scaling=call.scaling,
            window=call.window,
            position_pages=pages.positions,
            query_positions=self._query_positions,
            return_lse=bool(self._groups),
        )
        if lse is None:
            return out
        quantized = [self._attend_groups(call, layout) for layout in self._groups]
        return ops.merge([(out, lse), *quantized]).to(out.dtype)

    def _attend_groups(self, call: LayerCall, layout: GroupLayout) -> tuple[Tensor, Tensor]:
        """Attend to the groups of one layout; rows whose turns have none see nothing."""
        tables, fills = self._groups[layout]
        return ops.quantized_attention(
            call.query,
            self._pages.key_bytes,
            self._pages.value_bytes,
            tables[call.layer],
            fills[call.layer],
            self._query_cu,
            layout=layout,
            scaling=call.scaling,
            window=call.window,
            query_positions=self._query_positions,
        )


def prepare_groups(spec: ModelSpec, device: torch.device) -> None:
    """Have attention over groups compiled before a turn needs it: all codecs, few and many
    queries, and the model's kinds of layers."""
    if spec.head_dim % 2:
        return  # no codec holds such heads
    windows = {window is not None for window in spec.sliding_windows}
    for bits, queries, windowed in itertools.product(BITS.values(), (1, 64), windows):
        _attend_nothing(spec, GroupLayout(bits, spec.head_dim), queries, windowed, device)


def _attend_nothing(
    spec: ModelSpec, layout: GroupLayout, queries: int, windowed: bool, device: torch.device
) -> None:
    q_shape, dtype = (spec.num_q_heads, queries, spec.head_dim), TORCH_DTYPE[spec.dtype]
    nothing = torch.zeros(1, spec.num_kv_heads, 2, dtype=torch.int32, device=device)
    ops.quantized_attention(
        torch.zeros(q_shape, dtype=dtype, device=device),
        torch.zeros(1, layout.key_bytes, dtype=torch.uint8, device=device),
        torch.zeros(1, layout.value_bytes, dtype=torch.uint8, device=device),
        nothing,
        nothing,
        torch.tensor([0, queries], dtype=torch.int32),
        layout=layout,
        scaling=1.0,
        window=1 if windowed else None,
        query_positions=torch.zeros(queries, dtype=torch.int32, device=device),
    )


def _turn(member: Member) -> TurnKV:
    assert isinstance(member.kv, TurnKV)
    return member.kv


def _positions(members: Sequence[Member]) -> Tensor:
    return torch.cat(
        [torch.arange(m.first_position, m.first_position + len(m.token_ids)) for m in members]
    )


def _stacked_groups(
    turns: Sequence[TurnKV], layout: GroupLayout, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Put the turns' group tables, and their fills, beside one another."""
    nothing = np.zeros((*turns[0].tables.shape[:2], 0), np.int32)
    tables, fills = zip(*(t.groups.get(layout, (nothing, nothing)) for t in turns), strict=True)
    return (
        torch.from_numpy(_stacked(tables)).to(device),
        torch.from_numpy(_stacked(fills)).to(device),
    )


def _stacked(tables: Sequence[Ints]) -> Ints:
    """Put tables [layers, kv_heads, C_s] beside one another: [layers, S, kv_heads, max C]."""
    layers, heads, _ = tables[0].shape
    out = np.zeros((layers, len(tables), heads, max(t.shape[2] for t in tables)), np.int32)
    for s, table in enumerate(tables):
        out[:, s, :, : table.shape[2]] = table
    return out
