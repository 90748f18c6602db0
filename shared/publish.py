"""Publishing a node: layers in, manifest last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from criticalkv.kernels.group_layout import MAX_MAGNITUDE
from criticalkv.shared.cache.codec import checked_layout
from criticalkv.shared.cache.group_wire import pack_groups
from criticalkv.shared.cache.manifest import Manifest, Segment
from criticalkv.shared.cache.quality import Quality
from criticalkv.shared.cache.quantized import QuantizedLayer, quantize_layer
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.cache.wire import pack_layer
from criticalkv.shared.errors import (
    InvalidRequestError,
    NodeTooLargeError,
    NumericsError,
    PolicyError,
    StoreUnavailableError,
)
from criticalkv.shared.finite import is_finite
from criticalkv.shared.identity import CODEC_RAW, Identity
from criticalkv.shared.node_store import NodeStore


@dataclass(frozen=True)
class Published:
    """A node that readers can see now."""

    manifest: Manifest
    published: bool
    stored_bytes: int


class NodePublisher:
    """Sends a node layer by layer and publishes it with `commit`.

    A context manager: leaving it without a commit publishes nothing. `watch` is called with
    each layer of a quantized node and its groups, before they are sent.
    """

    def __init__(
        self,
        store: NodeStore,
        identity: Identity,
        attempt: str,
        *,
        lease_token: str = "",
        ancestors: Sequence[str] = (),
        expected_bytes: int = 0,
        tenant: str = "",
        timeout_s: float = 600.0,
        check: Callable[[], None] | None = None,
        watch: Callable[[RaggedLayer, QuantizedLayer], None] | None = None,
    ) -> None:
        self._watch = watch
        self._ancestors = tuple(ancestors)
        self._identity = identity
        self._attempt = attempt
        self._segments: list[Segment] = []
        self._lens: list[Tensor] = []
        self._writer = store.open_put(
            identity.node_id,
            attempt,
            lease_token=lease_token,
            ancestors=self._ancestors,
            expected_bytes=expected_bytes,
            tenant=tenant,
            timeout_s=timeout_s,
            check=check,
        )

    def __enter__(self) -> NodePublisher:
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def send(self, layer: RaggedLayer, tier_lens: Tensor) -> None:
        """Send the next layer.

        Args:
            layer: entries in rank order.
            tier_lens: int64 [tiers, kv_heads].

        Raises:
            NumericsError: if a key or value is not finite.
            PolicyError: if the node's codec cannot hold them.
        """
        index = len(self._lens)
        if not (is_finite(layer.keys) and is_finite(layer.values)):
            raise NumericsError(f"non-finite KV in layer {index}")
        for segment, payload in self._packed(index, layer, tier_lens):
            self._segments.append(segment)
            with _damage_on_the_way():
                self._writer.send(payload)
        self._lens.append(tier_lens.cpu())

    def _packed(
        self, index: int, layer: RaggedLayer, tier_lens: Tensor
    ) -> Iterator[tuple[Segment, bytearray]]:
        layout = checked_layout(self._identity.codec, layer.keys.shape[1])
        if layout is None:
            return pack_layer(index, layer, tier_lens)
        _check_magnitude(index, layer)
        groups = quantize_layer(layer, tier_lens, layout)
        if self._watch is not None:
            self._watch(layer, groups)
        return pack_groups(index, groups, tier_lens)

    def commit(
        self,
        *,
        token_ids: Sequence[int],
        next_position: int,
        head_dim: int,
        tiers: Sequence[str],
        nested: bool = True,
        pending_ids: Sequence[int] = (),
        prefill_ms: float = 0.0,
        ttl_ms: int = 0,
        quality: Quality | None = None,
    ) -> Published:
        """Publish the manifest; after this every reader sees the whole node.

        Raises:
            StoreFullError, LeaseLostError, StoreUnavailableError: nothing is published.
        """
        lens = torch.stack(self._lens, dim=1)
        manifest = Manifest(
            identity=self._identity,
            attempt=self._attempt,
            ancestors=self._ancestors,
            num_tokens=len(token_ids),
            next_position=next_position,
            pending_ids=tuple(pending_ids),
            num_layers=lens.shape[1],
            num_kv_heads=lens.shape[2],
            head_dim=head_dim,
            tiers=tuple(tiers),
            nested=nested,
            prefill_ms=prefill_ms,
            quality=quality,
            tier_lens=tuple(tuple(map(tuple, tier)) for tier in lens.tolist()),
            segments=tuple(self._segments),
        )
        record = TokenRecord(
            identity=self._identity,
            token_ids=tuple(token_ids),
            ancestors=self._ancestors,
            pending_ids=tuple(pending_ids),
            store_tier=tiers[-1],
        )
        with _damage_on_the_way():
            result = self._writer.commit(manifest, record, ttl_ms=ttl_ms)
        return Published(manifest, result.published, result.stored_bytes)


def _check_magnitude(index: int, layer: RaggedLayer) -> None:
    """Refuse what a quantized codec cannot hold: its zeros are fp16.

    Raises:
        PolicyError: saying what to do.
    """
    for entries in filter(Tensor.numel, (layer.keys, layer.values)):
        low, high = (float(x) for x in torch.aminmax(entries))
        if max(-low, high) > MAX_MAGNITUDE:
            raise PolicyError(
                f"layer {index} holds a key or value beyond ±{MAX_MAGNITUDE:.0f}, the most that "
                "int8 and int4 can store; use codec=raw",
                param="policy",
            )


@contextmanager
def _damage_on_the_way() -> Iterator[None]:
    """Tell what the store refuses of a put as what it is: no client's request is at fault.

    All frames of a node are made here, so that a wrong one was damaged by the network.
    """
    try:
        yield
    except NodeTooLargeError:
        raise
    except InvalidRequestError as error:
        raise StoreUnavailableError(
            f"a node did not arrive in the store as it was sent ({error.message}); retry",
            retry_after_s=1.0,
        ) from error


def publish_cache(
    store: NodeStore,
    identity: Identity,
    cache: RaggedCache,
    *,
    token_ids: Sequence[int],
    ancestors: Sequence[str],
    attempt: str,
    nested: bool = True,
    pending_ids: Sequence[int] = (),
    prefill_ms: float = 0.0,
    ttl_ms: int = 0,
    tenant: str = "",
    timeout_s: float = 600.0,
) -> Published:
    """Publish a node whose KV is at hand as a whole, such as a turn."""
    with NodePublisher(
        store,
        identity,
        attempt,
        ancestors=ancestors,
        # A codec's size is known once it is made: 0 says so.
        expected_bytes=cache.nbytes if identity.codec == CODEC_RAW else 0,
        tenant=tenant,
        timeout_s=timeout_s,
    ) as publisher:
        for index, layer in enumerate(cache.layers):
            publisher.send(layer, cache.tier_lens[:, index])
        return publisher.commit(
            token_ids=token_ids,
            next_position=cache.next_position,
            head_dim=cache.layers[0].keys.shape[1],
            tiers=cache.tiers,
            nested=nested,
            pending_ids=pending_ids,
            prefill_ms=prefill_ms,
            ttl_ms=ttl_ms,
        )
