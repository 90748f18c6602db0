"""The untouched model under a mask that says what every token saw, and naive eviction.

Knows nothing of our attention, caches or selections: transformers' eager attention over
the whole sequence, an additive −inf mask per layer, head and query token, and plain loops
over the attention that it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import IMPLEMENTATION
from criticalkv.shared.model.loader import LoadedModel

MAX_TOKENS = 256
Kept = list[list[list[int]]]
"""[layer][head] → ascending positions."""


class Run:
    """What one forward of the untouched model gives.

    Attributes:
        logits: [tokens, vocab].
        attention: by layer, [num_q_heads, tokens, tokens].
        norms: by layer, ‖v·W_O‖₁ by query head, [num_q_heads, tokens].
    """

    def __init__(self) -> None:
        self.logits = torch.empty(0)
        self.attention: list[Tensor] = []
        self.norms: list[Tensor] = []


class NaiveChain:
    """Tokens so far, what each of them saw, and what the next ones will see."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._spec = model.spec
        self.tokens: list[int] = []
        every = range(self._spec.num_layers)
        heads = range(self._spec.num_kv_heads)
        size = (len(every), len(heads), MAX_TOKENS, MAX_TOKENS)
        self._mask = torch.full(size, float("-inf"))
        self._ancestors: Kept = [[[] for _ in heads] for _ in every]
        self.steps: list[tuple[int, Kept]] = []

    def one_piece(self, ids: Sequence[int]) -> None:
        """Add a node whose tokens all see one another."""
        own = self._nothing()
        self._append(ids, own)
        self.end_node([[list(h) for h in layer] for layer in own])

    def end_node(self, own: Kept) -> None:
        """Let later nodes see these entries of the last one."""
        for layer, heads in enumerate(own):
            for head, positions in enumerate(heads):
                self._ancestors[layer][head] = [*self._ancestors[layer][head], *positions]

    def replace_last(self, before: Kept, own: Kept) -> None:
        """Let later nodes see other entries of the last node than all."""
        self._ancestors = before
        self.end_node(own)

    @property
    def ancestors(self) -> Kept:
        """What later nodes see of all nodes so far."""
        return [[list(h) for h in layer] for layer in self._ancestors]

    def stepwise(self, ids: Sequence[int], policy: Policy) -> Kept:
        """Add a node under a stepwise policy; return what is left of it."""
        own, start = self._nothing(), len(self.tokens)
        self.steps = []
        for begin in range(0, len(ids), policy.interval):
            piece = ids[begin : begin + policy.interval]
            self._append(piece, own)
            run = self.run()
            done = begin + len(piece)
            for layer in range(self._spec.num_layers):
                own[layer] = self._evict(own[layer], layer, start, done, policy, run)
            self.steps.append((done, [[list(h) for h in layer] for layer in own]))
        self.end_node(own)
        return own

    def run(self) -> Run:
        """Run the untouched model over all tokens so far."""
        run, hooks = Run(), []
        for index, layer in enumerate(self._model.model.model.layers):
            n, group = len(self.tokens), self._spec.group_size
            mask = self._mask[index, :, :n, :n].repeat_interleave(group, 0)[None]
            attention = layer.self_attn
            hooks += [
                attention.register_forward_pre_hook(
                    lambda _m, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}),
                    with_kwargs=True,
                ),
                attention.register_forward_hook(
                    lambda _m, _args, out: run.attention.append(out[1][0])
                ),
                attention.v_proj.register_forward_hook(
                    lambda _m, _args, out, i=index: run.norms.append(self._norms(i, out[0]))
                ),
            ]
        model: Any = self._model.model
        model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                run.logits = model(torch.tensor([self.tokens]), use_cache=False).logits[0]
        finally:
            model.set_attn_implementation(IMPLEMENTATION)
            for hook in hooks:
                hook.remove()
        return run

    def _nothing(self) -> Kept:
        return [[[] for _ in layer] for layer in self._ancestors]

    def _append(self, ids: Sequence[int], own: Kept) -> None:
        """Add tokens that see the ancestors, `own`, and one another; add them to `own`."""
        for token in ids:
            position = len(self.tokens)
            self.tokens.append(token)
            for layer, window in enumerate(self._spec.sliding_windows):
                for head in range(self._spec.num_kv_heads):
                    own[layer][head].append(position)
                    seen = {*self._ancestors[layer][head], *own[layer][head]}
                    oldest = 0 if window is None else position - window + 1
                    visible = [p for p in seen if p >= oldest]
                    self._mask[layer, head, position, visible] = 0

    def _norms(self, layer: int, values: Tensor) -> Tensor:
        spec = self._spec
        by_head = values.view(-1, spec.num_kv_heads, spec.head_dim)
        w_o = self._model.w_o(layer)
        rows = []
        for q in range(spec.num_q_heads):
            columns = w_o[:, q * spec.head_dim : (q + 1) * spec.head_dim]
            rows.append((by_head[:, q // spec.group_size] @ columns.T).abs().sum(-1))
        return torch.stack(rows)

    def _evict(
        self, own: list[list[int]], layer: int, start: int, done: int, policy: Policy, run: Run
    ) -> list[list[int]]:
        window = self._spec.sliding_windows[layer]
        end = start + done
        if window is not None:
            return [[p for p in head if p >= end - window] for head in own]
        scores = [self._scores(own[h], h, layer, end, policy, run, start) for h in range(len(own))]
        return naive_selection(own, scores, end, start, policy)

    def _scores(
        self,
        own: list[int],
        head: int,
        layer: int,
        end: int,
        policy: Policy,
        run: Run,
        start: int,
    ) -> tuple[list[float], list[float]]:
        """Attention of the last queries, pooled, and critical scores of a head's entries."""
        group = self._spec.group_size
        queries = range(max(start, end - policy.window), end)
        rows = run.attention[layer][head * group : (head + 1) * group]
        rows = rows[:, list(queries)].double()
        # A query of an earlier piece saw entries that are gone: of what is left, its softmax.
        rows /= rows[..., [*self._ancestors[layer][head], *own]].sum(-1, keepdim=True)
        mean = rows.mean((0, 1))[own].tolist()
        before = sum(p < queries[0] for p in own)
        half, pooled = policy.kernel // 2, list(mean)
        for i in range(before):
            near = mean[max(0, i - half) : min(before, i + half + 1)]
            pooled[i] = max(near) if policy.pooling == "max" else sum(near) / policy.kernel
        norms = run.norms[layer][head * group : (head + 1) * group].double().mean(0)[own].tolist()
        eps = float(policy.eps)
        return pooled, [(a + eps) * v for a, v in zip(pooled, norms, strict=True)]


def naive_selection(
    own: list[list[int]],
    scores: list[tuple[list[float], list[float]]],
    end: int,
    start: int,
    policy: Policy,
) -> list[list[int]]:
    """Choose what each head keeps, in plain loops."""
    tokens = end - start
    keep = Fraction(policy.keep) * tokens if policy.target == 0 else Fraction(policy.target)
    budget = min(max(1, keep.numerator // keep.denominator), max(map(len, own)))
    forced = [{p for p in head if p >= end - policy.window} for head in own]
    spare = [max(0, budget - len(f)) for f in forced]
    if policy.allocator == "adakv":
        deciding = [pair[policy.selector == "critical"] for pair in scores]
        spare = _adakv(own, deciding, forced, spare, Fraction(policy.safeguard))
    out = []
    for head, (attention, critical) in enumerate(scores):
        kept = set(forced[head])
        stages = {
            "plain": [(spare[head], attention)],
            "critical": [(spare[head], critical)],
            "twostage": [
                (_floor(Fraction(policy.alpha) * spare[head]), attention),
                (spare[head] - _floor(Fraction(policy.alpha) * spare[head]), critical),
            ],
        }[policy.selector]
        for count, score in stages:
            ranked = sorted(zip(score, own[head], strict=True), key=lambda x: (-x[0], x[1]))
            kept.update([p for _, p in ranked if p not in kept][:count])
        out.append(sorted(kept))
    return out


def _adakv(
    own: list[list[int]],
    scores: list[list[float]],
    forced: list[set[int]],
    spare: list[int],
    safeguard: Fraction,
) -> list[int]:
    floors = [_floor(safeguard * s) for s in spare]
    rest = []
    for head, positions in enumerate(own):
        ranked = sorted(
            (-a, head, p)
            for a, p in zip(scores[head], positions, strict=True)
            if p not in forced[head]
        )
        rest += ranked[floors[head] :]
    won = [head for _, head, _ in sorted(rest)[: sum(spare) - sum(floors)]]
    return [floor + won.count(head) for head, floor in enumerate(floors)]


def _floor(x: Fraction) -> int:
    return x.numerator // x.denominator
