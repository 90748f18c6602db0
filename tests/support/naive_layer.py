"""Random tensors of one layer, and its scores by loops over queries, heads and entries in fp64.

On the tests' path: what the tests of several scorers share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from criticalkv.shared.eviction.context_layer import ContextLayer, Rotation

HEADS, GROUP, DIM, WIDTH, SCALING = 2, 3, 16, 40, 0.4


class Layer:
    """Random tensors of one layer over n tokens, with a ragged parent."""

    def __init__(
        self,
        n: int,
        m: int,
        *,
        tail: int = 0,
        parent: tuple[int, ...] | None = (4, 0),
        heads: int = HEADS,
        group: int = GROUP,
        first: int = 0,
        rotation: Rotation | None = None,
    ) -> None:
        torch.manual_seed(n * 100 + m)
        self.n, self.heads, self.group = n, heads, group
        self.first, self.rotation = first, rotation
        self.queries = torch.randn(heads * group, m, DIM)
        self.keys, self.values = torch.randn(heads, n, DIM), torch.randn(heads, n, DIM)
        self.w_o = torch.randn(WIDTH, heads * group * DIM) / 8
        self.out = torch.randn(heads * group, m, DIM)
        self.tail = torch.randn(heads, tail, DIM)
        lens = parent or (0,) * heads
        self.prefix = [torch.randn(k, DIM) for k in lens]
        self.parent: dict[str, Tensor] = {}
        if parent:
            cu = torch.tensor([0, *lens]).cumsum(0)
            self.parent = {"prefix_keys": torch.cat(self.prefix), "prefix_cu": cu}

    @property
    def output_norm(self) -> Tensor:
        """‖o_q‖₂ after W_O, fp64 [m]."""
        joined = self.out.double().transpose(0, 1).flatten(1)
        return (joined @ self.w_o.double().T).norm(dim=-1)

    def context(self) -> ContextLayer:
        return ContextLayer(
            queries=self.queries,
            out=self.out,
            keys=self.keys,
            values=self.values,
            w_o=self.w_o,
            scaling=SCALING,
            first_position=self.first,
            rotation=self.rotation,
            **self.parent,
        )

    def attention(self, h: int, i: int, visible: int, tail: int) -> Tensor:
        """Softmaxed attention of query i of query head h to the n own entries, fp64 [n]."""
        kv = h // self.group
        keys = torch.cat([self.prefix[kv], self.keys[kv, :visible], self.tail[kv, :tail]])
        a = (SCALING * keys.double() @ self.queries[h, i].double()).softmax(0)
        own = a[len(self.prefix[kv]) : len(self.prefix[kv]) + visible]
        return torch.cat([own, torch.zeros(self.n - visible, dtype=torch.float64)])

    def causal(self, h: int, back: int) -> Tensor:
        """Attention of query head h's query `back` tokens before the last, fp64 [n]."""
        return self.attention(h, self.queries.shape[1] - 1 - back, self.n - back, 0)

    def norm(self, kv: int, i: int, p: int) -> list[float]:
        """‖v W_O‖_p of entry i for each query head of the group."""
        out = []
        for h in range(kv * self.group, (kv + 1) * self.group):
            w = self.w_o[:, h * DIM : (h + 1) * DIM].double()
            out.append(float((w @ self.values[kv, i].double()).norm(p)))
        return out

    def critical(self, attention: Tensor, eps: float, p: int) -> Tensor:
        out = torch.zeros(self.heads, self.n, dtype=torch.float64)
        for kv in range(self.heads):
            for i in range(self.n):
                out[kv, i] = (attention[kv, i] + eps) * sum(self.norm(kv, i, p)) / self.group
        return out

    def relative(self, seen: Callable[[int, int], Tensor]) -> Tensor:
        out = torch.zeros(self.heads, self.n, dtype=torch.float64)
        for kv in range(self.heads):
            for g in range(self.group):
                for q in range(self.queries.shape[1]):
                    a = seen(kv * self.group + g, q)
                    for i in range(self.n):
                        share = a[i] * self.norm(kv, i, 2)[g] / self.output_norm[q].double()
                        out[kv, i] += share**2
        return out


def only_head(layer: ContextLayer, h: int, padding: int = 0) -> ContextLayer:
    """One KV head of a layer as a layer of its own, without its leading padding."""
    group, dim = layer.group_size, layer.keys.shape[2]
    rows = slice(h * group, (h + 1) * group)
    prefix: dict[str, Tensor | None] = {}
    if layer.prefix_keys is not None and layer.prefix_cu is not None:
        a, b = layer.prefix_cu[h : h + 2].tolist()
        prefix = {"prefix_keys": layer.prefix_keys[a:b], "prefix_cu": torch.tensor([0, b - a])}
    asking = min(layer.queries.shape[1], layer.n - padding)
    return replace(
        layer,
        queries=layer.queries[rows, -asking:],
        out=layer.out[rows, -asking:],
        keys=layer.keys[h : h + 1, padding:],
        values=layer.values[h : h + 1, padding:],
        w_o=layer.w_o[:, h * group * dim : (h + 1) * group * dim],
        positions=None if layer.positions is None else layer.positions[h : h + 1, padding:],
        padding=None,
        **prefix,
    )


def close(got: Tensor | None, expected: Tensor, rtol: float = 1e-4) -> None:
    """Compare fp32 scores with fp64 ones."""
    assert got is not None
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=1e-7)
