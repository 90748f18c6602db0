"""Quotas: each tenant's share of the store, as configured."""

from __future__ import annotations

from dataclasses import dataclass

from criticalkv.services.store.metrics import METRICS
from criticalkv.shared.config import StoreConfig, TenantQuota
from criticalkv.shared.errors import NodeTooLargeError, QuotaExceededError
from criticalkv.shared.identity import tenant_digest


@dataclass(frozen=True)
class Quota:
    """The limits of one tenant; 0 = none.

    Attributes:
        field: configuration field that they come from.
    """

    field: str
    max_bytes: int = 0
    max_nodes: int = 0
    max_pins: int = 0
    max_ttl_ms: int = 0

    @classmethod
    def of(cls, field: str, config: TenantQuota) -> Quota:
        """Return the limits that a section of the configuration sets."""
        return cls(
            field,
            config.max_mb << 20,
            config.max_nodes,
            config.max_pins,
            config.max_ttl_s * 1000,
        )

    def shortened(self, ttl_ms: int) -> int:
        """Return a time to live that is not longer than allowed, ms."""
        return min(ttl_ms, self.max_ttl_ms) if self.max_ttl_ms else ttl_ms

    def too_large(self, nbytes: int) -> NodeTooLargeError:
        """Return the error of a node that alone exceeds the limit of bytes, and count it."""
        METRICS.quota_refusals.labels("max_mb").inc()
        return NodeTooLargeError(
            f"a node of {nbytes} bytes exceeds the tenant's {self.field}.max_mb "
            f"({self.max_bytes} bytes)",
            param=f"{self.field}.max_mb",
        )

    def exceeded(self, name: str, what: str) -> QuotaExceededError:
        """Return the error of a refusal, and count it.

        Args:
            name: the limit's name in the configuration.
            what: what was asked for, in words.
        """
        METRICS.quota_refusals.labels(name).inc()
        return QuotaExceededError(
            f"{what} exceeds the tenant's {self.field}.{name}, and nothing of it may go",
            param=f"{self.field}.{name}",
            retry_after_s=1.0,
        )


_UNLIMITED = Quota("")


class Quotas:
    """All quotas, by tenant digest."""

    def __init__(self, config: StoreConfig) -> None:
        self._default = Quota.of("store.tenant_quota", config.tenant_quota)
        self._own = {
            tenant_digest(name): Quota.of("store.tenant_quotas.*", quota)
            for name, quota in config.tenant_quotas.items()
        }

    def of(self, tenant: str) -> Quota:
        """Return a tenant's quota; nobody ("") has none."""
        return self._own.get(tenant, self._default) if tenant else _UNLIMITED
