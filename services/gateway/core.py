"""The gateway's parts, wired once, without HTTP and without Ray."""

from __future__ import annotations

import secrets
from decimal import Decimal

from transformers import PreTrainedTokenizerBase

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.auth import Authenticator, Tenant
from criticalkv.services.gateway.background import Background
from criticalkv.services.gateway.metrics import Metrics
from criticalkv.services.gateway.nodes import Model, Want, is_ours
from criticalkv.services.gateway.plan import Planner
from criticalkv.services.gateway.prefill_once import Prefiller
from criticalkv.services.gateway.restore import Restorer
from criticalkv.services.gateway.swap import Swapper
from criticalkv.services.gateway.transcript import Metadata, Transcript
from criticalkv.services.gateway.workers import Workers
from criticalkv.shared.config import Config
from criticalkv.shared.errors import ContextExpiredError, ContextNotFoundError, ModelNotFoundError
from criticalkv.shared.identity import NodeId, resolve_tier
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.store_client import StoreClient


class GatewayCore:
    """Everything that requests share.

    Args:
        config: all of it.
        model: identity and limits of the served model.
        tokenizer: the model's, with its chat template.
        store: client; closed with the core.
        workers: prefill and decode.

    Raises:
        ConfigError: if the gateway would be open to other machines without keys.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        tokenizer: PreTrainedTokenizerBase,
        store: StoreClient,
        workers: Workers,
    ) -> None:
        self.config = config
        self.model = model
        self.auth = Authenticator(config.gateway)
        self.template = ChatTemplate(tokenizer)
        self.store = AsyncStore(store, longest_s=config.gateway.request_timeout_s)
        self.workers = workers
        self.metrics = Metrics()
        prefiller = Prefiller(self.store, workers, self.metrics)
        restorer = Restorer(self.store, prefiller, model, config.eviction.tiers)
        self.planner = Planner(
            self.store, model, self.template, prefiller, restorer, config.gateway
        )
        limits = config.gateway
        self.background = Background(
            self.metrics, limits.background_queue, limits.background_timeout_s
        )
        self.swapper = Swapper(
            self.store, self.planner, self.background, config.eviction.fold_after
        )

    async def aclose(self) -> None:
        """Stop what runs in the background, then threads and connections."""
        await self.background.aclose()
        await self.store.leftovers.aclose()
        self.close()

    def close(self) -> None:
        """Stop threads and connections."""
        self.store.close()

    def check_model(self, name: str) -> None:
        """Accept the served model's name only; a closed list, no look-up.

        Raises:
            ModelNotFoundError: for every other name.
        """
        if name != self.model.name:
            raise ModelNotFoundError(
                f"model {name[:100]!r} is not served here; this is {self.model.name!r}",
                param="model",
            )

    def want(
        self,
        *,
        policy: str,
        salt: str,
        tenant: str,
        read_tier: str | None = None,
        store_tier: str | None = None,
        ttl_ms: int = 0,
        turn_policy: str | None = None,
        first_policy: str | None = None,
        known: frozenset[NodeId] = frozenset(),
    ) -> Want:
        """Combine a request's wishes with the defaults.

        An explicit tier, read or stored, asks for a node that has it; it counts as the
        next lower tier that this server stores.
        """
        tiers = self.config.eviction.tiers
        asked = [resolve_tier(tiers, tier) for tier in (read_tier, store_tier) if tier]
        store = store_tier or self.config.eviction.store_tier
        return Want(
            policy=policy,
            store_tier=max([store, *asked], key=Decimal),
            salt=salt,
            tenant=tenant,
            read_tier=read_tier,
            at_least=max(asked, key=Decimal, default=None),
            ttl_ms=ttl_ms,
            turn_policy=turn_policy or self.config.eviction.turn_policy,
            first_policy=None if first_policy == policy else first_policy,
            known=known,
        )

    def transcript(self, policy: str, salt: str) -> Transcript:
        """Begin a conversation's digest chain."""
        model = self.model
        return Transcript.start(
            model.model_digest, model.tokenizer_digest, model.dtype, policy, salt
        )

    def describe(
        self, kind: str, transcript: Transcript, policy: str, salt: str, **more: object
    ) -> Metadata:
        """Return what a handle of this model carries."""
        model = self.model
        return Metadata.model_validate(
            {
                "kind": kind,
                "model": model.name,
                "model_digest": model.model_digest,
                "tokenizer_digest": model.tokenizer_digest,
                "policy": policy,
                "salt": salt,
                "roles": list(transcript.roles),
                "is_open": transcript.is_open,
                "digest": transcript.digest,
                **more,
            }
        )

    def metadata(self, data: bytes) -> Metadata:
        """Read a handle's metadata.

        Raises:
            ContextExpiredError: if it belongs to other weights or another tokenizer, or
                names a policy that this version reads otherwise or not at all.
        """
        meta = Metadata.decode(data)
        ours = (self.model.model_digest, self.model.tokenizer_digest)
        if (meta.model_digest, meta.tokenizer_digest) != ours:
            raise ContextExpiredError("the context belongs to another version of the model")
        if not all(is_ours(name) for name in (meta.policy, meta.first_policy) if name):
            raise ContextExpiredError("the context was stored by another version")
        return meta

    async def resolve(
        self, tenant: Tenant, handle: str, param: str = "criticalkv.context_id"
    ) -> pb.Handle:
        """Return a tenant's handle.

        Args:
            tenant: who asks.
            handle: as the client gave it.
            param: field that has it.

        Raises:
            ContextNotFoundError: always with the same words, whether the handle is
                malformed, unknown, expired or another tenant's.
        """
        try:
            return await self.store.resolve_handle(tenant.digest, handle)
        except ContextNotFoundError:
            raise ContextNotFoundError("no such context", param=param) from None

    def new_handle(self, prefix: str) -> str:
        """Return a fresh random handle."""
        return f"{prefix}_{secrets.token_hex(16)}"
