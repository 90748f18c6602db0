"""One allocator per file: how a tier's budget is spread over heads.

Each takes a Contest and returns int64 [layers, num_kv_heads]: the entries each head
keeps, forced ones included. Every allocator grows monotonically with the tier, which
nested tiers need.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from criticalkv.shared.eviction.allocators.adakv import adakv
from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.allocators.duo import duo
from criticalkv.shared.eviction.allocators.headkv import headkv
from criticalkv.shared.eviction.allocators.model import model
from criticalkv.shared.eviction.allocators.pyramidkv import pyramidkv
from criticalkv.shared.eviction.allocators.uniform import uniform
from criticalkv.shared.eviction.policy import Allocator

AllocatorFn = Callable[[Contest], Tensor]

ALLOCATORS: dict[Allocator, AllocatorFn] = {
    "uniform": uniform,
    "adakv": adakv,
    "headkv": headkv,
    "pyramidkv": pyramidkv,
    "duo": duo,
    "model": model,
}
