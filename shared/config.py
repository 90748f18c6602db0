"""The one configuration: every setting, its default and its meaning.

Read once at the edge (CLI or `serve.yaml`), then passed down as values. Sources, the
later wins: defaults, a YAML file, environment `CRITICALKV__SECTION__FIELD`, flags.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from platformdirs import user_cache_dir, user_data_dir
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from criticalkv.shared.errors import ConfigError, PolicyError
from criticalkv.shared.eviction.policy import DEFAULT_POLICY, Policy, canonical_turn_policy
from criticalkv.shared.identity import POLICY_DENSE, canonical_tier

ENV_PREFIX = "CRITICALKV__"
MAX_FOLD_AFTER = 500  # below what a chain may have: it grows while it is folded
DEFAULT_TIERS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "1")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        # `gateway:` with nothing below it says nothing: the section has its defaults.
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if not (v is None and cls._is_section(k))}

    @classmethod
    def _is_section(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        kind = field.annotation if field else None
        return isinstance(kind, type) and issubclass(kind, BaseModel)


class ModelConfig(_Section):
    """Which model is served, and how it is loaded."""

    path: str = Field(
        default="demo",
        description="'demo' (the small model, fetched and converted once), a directory with "
        "safetensors, or a Hub name that is already in the local cache",
    )
    name: str = Field(default="", description="name in the API; empty = the directory's name")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="auto = cuda if the workers have num_gpus, else cpu; outside Ray cuda where "
        "there is one",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto = float32 on CPU, bfloat16 on GPU"
    )
    cache_dir: str = Field(
        default_factory=lambda: user_cache_dir("criticalkv"),
        description="where the converted demo model is kept",
    )


class EvictionConfig(_Section):
    """Defaults of compression; a request may choose others."""

    policy: str = Field(default=DEFAULT_POLICY, description="scorer+allocator+selector[:k=v,…]")
    first_policy: str | None = Field(
        default=None,
        description="cheap policy under which a missing context is stored at once; `policy` then "
        "replaces it in the background; none = off",
    )
    fold_after: int = Field(
        default=64,
        ge=0,
        le=MAX_FOLD_AFTER,
        description="nodes in a conversation's chain, beyond which it becomes one new node in "
        "the background; 0 = off",
    )
    tiers: tuple[str, ...] = Field(default=DEFAULT_TIERS, description="kept fractions stored")
    store_tier: str = Field(default="0.4", description="highest tier that is stored")
    turn_policy: str = Field(
        default=POLICY_DENSE,
        description="of turns: dense = keep all; or a stepwise policy (interval=…), which evicts "
        "while the answer is generated",
    )
    canary_queries: int = Field(
        default=4,
        ge=0,
        le=64,
        description="a context's last queries, of every query head, that tell how much of their "
        "attention each tier keeps; 0 = off",
    )
    profiles_dir: str = Field(
        default_factory=lambda: str(Path(user_data_dir("criticalkv"), "profiles")),
        description="where `criticalkv profile` puts a model's head profiles, and prefill reads "
        "them",
    )

    @field_validator("policy", "first_policy")
    @classmethod
    def _policy(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            return Policy.parse(value).canonical()
        except PolicyError as error:
            raise ValueError(error.message) from None

    @field_validator("turn_policy")
    @classmethod
    def _turn_policy(cls, value: str) -> str:
        try:
            return canonical_turn_policy(value)
        except PolicyError as error:
            raise ValueError(error.message) from None

    @field_validator("first_policy", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "none" else value

    @field_validator("tiers", mode="before")
    @classmethod
    def _tiers(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value  # pydantic says what it should be
        tiers = tuple(canonical_tier(t) for t in value)
        if not tiers or list(tiers) != sorted(set(tiers), key=float):
            raise ValueError("tiers must ascend, without doubles")
        return tiers

    @field_validator("store_tier", mode="before")
    @classmethod
    def _store_tier(cls, value: Any) -> str:
        return canonical_tier(value)


class TenantQuota(_Section):
    """A tenant's share of the store. 0 = no limit."""

    max_mb: int = Field(default=0, ge=0, description="payload bytes, MiB")
    max_nodes: int = Field(default=0, ge=0, description="stored nodes")
    max_pins: int = Field(default=0, ge=0, description="pinned nodes")
    max_ttl_s: int = Field(
        default=0,
        ge=0,
        description="a longer time to live is shortened to it; token records, from which lost KV "
        "is rebuilt, live for record_ttl_s all the same",
    )


class StoreConfig(_Section):
    """The cache store server and the Redis behind it."""

    address: str = Field(
        default="127.0.0.1:50051", description="where the store listens and clients connect"
    )
    redis_url: str = Field(
        default="embedded",
        description="'embedded' (own Valkey child process) or a URL: redis://, rediss://, unix://; "
        "redis+sentinel://HOST:PORT,…/SERVICE, redis+cluster://HOST:PORT,… (rediss+… for TLS)",
    )
    redis_ca: str = Field(
        default="", description="certificate authority of rediss:// URLs, PEM; empty = the system's"
    )
    redis_reader_url: str = Field(
        default="",
        description="user (and address) that read_path 'direct' reads segments with; it needs GET "
        "on ckv:{*}:s:* and SELECT, and nothing else. The address must be of the same server or "
        "a replica of it; what is missing there costs a read through the store. Not for "
        "'embedded', which makes one itself",
    )
    read_path: Literal["grpc", "direct"] = Field(
        default="grpc",
        description="how clients read segments: through the store, or straight from its Redis "
        "where the store offers that",
    )
    data_dir: str = Field(
        default="", description="private directory of the embedded Valkey; empty = a fresh one"
    )
    memory_limit_mb: int = Field(default=2048, ge=16, description="payload bytes kept, MiB")
    high_watermark: float = Field(
        default=0.9, gt=0, le=1, description="share of the limit from which nodes shrink or go"
    )
    low_watermark: float = Field(
        default=0.8, gt=0, le=1, description="share of the limit down to which they do"
    )
    shrink_floor: str = Field(
        default="0.2", description="tier below which no node shrinks; it then goes as a whole"
    )
    tenant_quota: TenantQuota = TenantQuota()
    tenant_quotas: dict[str, TenantQuota] = Field(
        default={}, description="quotas of single tenants, by name, instead of tenant_quota"
    )
    node_ttl_s: int = Field(default=24 * 3600, ge=1, description="life of an untouched node")
    record_ttl_s: int = Field(
        default=7 * 24 * 3600,
        ge=1,
        description="life of token records, handles and answers; less, down to 10 minutes, while "
        "Redis has little room beside memory_limit_mb",
    )
    lease_ttl_s: int = Field(
        default=60, ge=1, description="life of unpublished segments; renewed while a put runs"
    )
    read_deadline_s: float = Field(
        default=30.0, gt=0, description="longest read; dropped segments live this much longer"
    )
    janitor_interval_s: float = Field(default=5.0, gt=0, description="pause between clean-ups")
    max_node_mb: int = Field(default=16384, ge=1, description="largest node accepted, MiB")
    max_concurrent_rpcs: int = Field(default=256, ge=1, description="more are refused at once")
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Prometheus port on loopback; 0 = off"
    )
    tls_cert: str = Field(
        default="",
        description="server certificate, PEM file; needed when `address` is not loopback",
    )
    tls_key: str = Field(default="", description="private key of `tls_cert`, PEM file")
    tls_ca: str = Field(
        default="",
        description="certificate authority that clients trust, PEM file; setting it "
        "makes clients use TLS",
    )
    tls_client_ca: str = Field(
        default="",
        description="certificate authority of clients, PEM file; setting it makes the server "
        "refuse clients without a certificate",
    )
    tls_client_cert: str = Field(default="", description="certificate of clients, PEM file")
    tls_client_key: str = Field(default="", description="private key of `tls_client_cert`, PEM")
    token_file: str = Field(
        default="",
        description="file with the bearer token of every call; needed when `address` "
        "is not loopback",
    )

    @field_validator("shrink_floor", mode="before")
    @classmethod
    def _shrink_floor(cls, value: Any) -> str:
        return canonical_tier(value)

    @model_validator(mode="after")
    def _watermarks(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark must not exceed high_watermark")
        return self


class Autoscaling(_Section):
    """Replicas of one deployment. min = max fixes the number."""

    min_replicas: int = Field(default=1, ge=0, description="never fewer")
    max_replicas: int = Field(default=1, ge=1, description="never more")
    upscale_delay_s: float = Field(default=5.0, ge=0, description="overload this long before up")
    downscale_delay_s: float = Field(default=60.0, ge=0, description="idle this long before down")
    report_interval_s: float = Field(
        default=2.0, gt=0, description="how often replicas and handles tell their load"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must not exceed max_replicas")
        return self


class PrefillAutoscaling(Autoscaling):
    """Prefill scales on prompt tokens that wait."""

    target_waiting_tokens: int = Field(
        default=8192, ge=1, description="prompt tokens accepted or queued, per replica"
    )


class DecodeAutoscaling(Autoscaling):
    """Decode scales on the scarcest of KV room, places in the batch and tokens to run."""

    min_replicas: int = Field(default=2, ge=0, description="never fewer")
    max_replicas: int = Field(default=2, ge=1, description="never more")
    target_kv_share: float = Field(
        default=0.8, gt=0, le=1, description="of the pool, for running and waiting sequences"
    )
    target_seq_share: float = Field(
        default=0.8, gt=0, le=1, description="of max_num_seqs, running and waiting"
    )
    target_waiting_tokens: int = Field(
        default=4096, ge=1, description="prompt tokens not yet run, per replica"
    )


class PrefillConfig(_Section):
    """The prefill deployment."""

    autoscaling: PrefillAutoscaling = PrefillAutoscaling()
    num_cpus: float = Field(default=0.2, gt=0, description="Ray CPUs per replica")
    num_gpus: float = Field(
        default=0.0, ge=0, le=1, description="Ray GPUs per replica; one at most"
    )
    ray_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="custom Ray resources per replica: nodes without them get none"
    )
    threads: int = Field(default=1, ge=1, description="torch threads per replica (CPU)")
    max_ongoing: int = Field(default=2, ge=1, description="prefills a replica accepts at once")
    max_queued: int = Field(default=32, ge=1, description="more waiting prefills get 429")
    spool_limit_mb: int = Field(
        default=4096,
        ge=64,
        description="host memory for full KV of replay and model-wide "
        "policies, MiB; a context that does not fit is refused",
    )


class DecodeConfig(_Section):
    """The decode deployment."""

    autoscaling: DecodeAutoscaling = DecodeAutoscaling()
    num_cpus: float = Field(default=0.2, gt=0, description="Ray CPUs per replica")
    num_gpus: float = Field(
        default=0.0, ge=0, le=1, description="Ray GPUs per replica; one at most"
    )
    ray_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="custom Ray resources per replica: nodes without them get none"
    )
    threads: int = Field(default=1, ge=1, description="torch threads per replica (CPU)")
    max_num_seqs: int = Field(default=16, ge=1, description="sequences decoded together")
    max_queued: int = Field(default=64, ge=1, description="more waiting requests get 429")
    max_num_batched_tokens: int = Field(
        default=512, ge=1, description="tokens of one step; longer questions run in pieces"
    )
    pool_mb: int = Field(
        default=2048, ge=1, description="KV of running sequences and of kept nodes, MiB"
    )
    page_size: int = Field(
        default=64,
        ge=1,
        le=1024,
        description="KV entries per page; quantized contexts need at least 18 (24 with head_dim "
        "16), and waste least at 128 in bf16 with head_dim 128",
    )
    node_cache_mb: int = Field(
        default=1024, ge=0, description="of the pool, for nodes that nobody uses now, MiB"
    )
    prepack: bool = Field(
        default=True, description="lay out weights for small batches (CPU, float32)"
    )

    @model_validator(mode="after")
    def _one_token_each(self) -> DecodeConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must not be less than max_num_seqs: every running "
                "sequence gets a token in every step"
            )
        return self

    routing_slack: int = Field(
        default=4,
        ge=0,
        description="a replica that holds a context gets its turns while it has at most this "
        "many more than the least loaded one",
    )


class GatewayConfig(_Section):
    """The HTTP front."""

    host: str = Field(default="127.0.0.1", description="address of the HTTP server")
    port: int = Field(default=8000, ge=1, le=65535, description="port of the HTTP server")
    api_keys_file: str = Field(
        default="",
        description="YAML map: sha256 hex of a key → tenant; empty = loopback only, tenant 'local'",
    )
    num_cpus: float = Field(default=0.2, gt=0, description="Ray CPUs of the gateway")
    ray_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="custom Ray resources per replica: nodes without them never run it"
    )
    implicit_breakpoint_tokens: int = Field(
        default=1024, ge=16, description="a first message this long is compressed by itself"
    )
    decode_max_suffix_tokens: int = Field(
        default=512, ge=1, description="more new tokens than this go through prefill"
    )
    max_body_mb: int = Field(default=32, ge=1, description="larger bodies get 413, MiB")
    max_messages: int = Field(default=2048, ge=1, description="messages per request")
    max_parts: int = Field(default=8192, ge=1, description="content parts per request")
    max_stop_strings: int = Field(default=4, ge=1, description="stop strings per request")
    max_stop_chars: int = Field(default=256, ge=1, description="characters per stop string")
    max_choices: int = Field(default=8, ge=1, le=64, description="largest n")
    default_max_tokens: int = Field(default=256, ge=1, description="max_tokens if not given")
    request_timeout_s: float = Field(default=600.0, gt=0, description="deadline of a request")
    write_timeout_s: float = Field(
        default=30.0, gt=0, description="a client that reads nothing for so long is cut off"
    )
    max_ongoing: int = Field(default=128, ge=1, description="requests at once; more get 429")
    background_queue: int = Field(
        default=32,
        ge=1,
        description="waiting refinements and folds; more are dropped, and no request notices",
    )
    background_timeout_s: float = Field(
        default=1800.0, gt=0, description="deadline of one refinement or fold"
    )


class Config(_Section):
    """All of it."""

    model: ModelConfig = ModelConfig()
    eviction: EvictionConfig = EvictionConfig()
    store: StoreConfig = StoreConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    gateway: GatewayConfig = GatewayConfig()


def placed(config: Config) -> Config:
    """Resolve device and dtype "auto", once for all workers and for the gateway.

    The dtype is part of every node's name. Decided by each process for itself it would
    differ between a gateway without a GPU and workers that have one.

    Raises:
        ConfigError: if a worker is to use a GPU that it does not ask for.
    """
    gpus = {"prefill": config.prefill.num_gpus, "decode": config.decode.num_gpus}
    device = config.model.device
    if device == "auto":
        device = "cuda" if any(gpus.values()) else "cpu"
    for name, count in gpus.items():
        if device == "cuda" and not count:
            raise ConfigError(
                f"{name}.num_gpus is 0 but the model runs on cuda: set it to 1, or model.device "
                "to cpu",
                param=f"{name}.num_gpus",
            )
    dtype = resolve_dtype(config.model.dtype, device)
    model = config.model.model_copy(update={"device": device, "dtype": dtype})
    return config.model_copy(update={"model": model})


def resolve_dtype(dtype: str, device: str) -> str:
    """Return the dtype's name; "auto" is float32 on CPU and bfloat16 on GPU."""
    if dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return dtype


def load_config(path: str | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Merge file, environment and overrides into a checked Config.

    Raises:
        ConfigError: naming the field that is wrong.
    """
    try:
        data: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read configuration {path}: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"configuration {path} must be a map of sections")
    merged = _merge(_merge(data, _from_env()), overrides or {})
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"configuration {where}: {first['msg']}", param=where) from None


def _from_env() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in sorted(os.environ, key=str.lower):  # a section comes before its fields
        if not name.startswith(ENV_PREFIX):
            continue
        field: Any = _env_value(name)
        for part in reversed(name.removeprefix(ENV_PREFIX).lower().split("__")):
            field = {part: field}
        if _hides(out, field):
            raise ConfigError(f"{name} sets a field of what another variable sets as a whole")
        out = _merge(out, field)
    return out


def _env_value(name: str) -> Any:
    try:
        return yaml.safe_load(os.environ[name])
    except yaml.YAMLError as error:
        # Without the value: it may hold a password.
        problem = getattr(error, "problem", None) or "malformed"
        raise ConfigError(f"the value of {name} is not YAML: {problem}") from None


def _hides(base: dict[str, Any], over: dict[str, Any]) -> bool:
    """Whether `over` puts a map where `base` has a plain value."""
    for key, value in over.items():
        below = base.get(key)
        if below is None or not isinstance(value, dict):
            continue
        if not isinstance(below, dict) or _hides(below, value):
            return True
    return False


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        if value is None and isinstance(out.get(key), dict):
            continue  # an empty section changes nothing
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merge(out[key], value) if both else value
    return out
