from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutFrame(_message.Message):
    __slots__ = ("begin", "segment", "commit", "payload")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    begin: PutBegin
    segment: PutSegment
    commit: PutCommit
    payload: bytes
    def __init__(self, begin: _Optional[_Union[PutBegin, _Mapping]] = ..., segment: _Optional[_Union[PutSegment, _Mapping]] = ..., commit: _Optional[_Union[PutCommit, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PutBegin(_message.Message):
    __slots__ = ("node_id", "attempt", "lease_token", "expected_bytes", "ancestors", "tenant")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    attempt: str
    lease_token: str
    expected_bytes: int
    ancestors: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    def __init__(self, node_id: _Optional[str] = ..., attempt: _Optional[str] = ..., lease_token: _Optional[str] = ..., expected_bytes: _Optional[int] = ..., ancestors: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class PutSegment(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class PutCommit(_message.Message):
    __slots__ = ("segment_count", "manifest_parts", "token_record", "ttl_ms", "record_ttl_ms")
    SEGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_PARTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RECORD_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RECORD_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    segment_count: int
    manifest_parts: _containers.RepeatedScalarFieldContainer[bytes]
    token_record: bytes
    ttl_ms: int
    record_ttl_ms: int
    def __init__(self, segment_count: _Optional[int] = ..., manifest_parts: _Optional[_Iterable[bytes]] = ..., token_record: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., record_ttl_ms: _Optional[int] = ...) -> None: ...

class PutResult(_message.Message):
    __slots__ = ("published", "generation", "stored_bytes")
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    published: bool
    generation: int
    stored_bytes: int
    def __init__(self, published: _Optional[bool] = ..., generation: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ("node_id", "tier", "layer_begin", "layer_end", "byte_limit", "direct")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    BYTE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    tier: str
    layer_begin: int
    layer_end: int
    byte_limit: int
    direct: bool
    def __init__(self, node_id: _Optional[str] = ..., tier: _Optional[str] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., byte_limit: _Optional[int] = ..., direct: _Optional[bool] = ...) -> None: ...

class GetFrame(_message.Message):
    __slots__ = ("header", "segment", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: GetHeader
    segment: GetSegment
    payload: bytes
    def __init__(self, header: _Optional[_Union[GetHeader, _Mapping]] = ..., segment: _Optional[_Union[GetSegment, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class GetHeader(_message.Message):
    __slots__ = ("manifest_parts", "generation", "tier", "segment_count", "location")
    MANIFEST_PARTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    manifest_parts: _containers.RepeatedScalarFieldContainer[bytes]
    generation: int
    tier: str
    segment_count: int
    location: RedisLocation
    def __init__(self, manifest_parts: _Optional[_Iterable[bytes]] = ..., generation: _Optional[int] = ..., tier: _Optional[str] = ..., segment_count: _Optional[int] = ..., location: _Optional[_Union[RedisLocation, _Mapping]] = ...) -> None: ...

class RedisLocation(_message.Message):
    __slots__ = ("path", "host", "port", "tls", "username", "password", "database")
    PATH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    USERNAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    DATABASE_FIELD_NUMBER: _ClassVar[int]
    path: str
    host: str
    port: int
    tls: bool
    username: str
    password: str
    database: int
    def __init__(self, path: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., tls: _Optional[bool] = ..., username: _Optional[str] = ..., password: _Optional[str] = ..., database: _Optional[int] = ...) -> None: ...

class GetSegment(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class StatNodesRequest(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class StatNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStat]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeStat, _Mapping]]] = ...) -> None: ...

class NodeStat(_message.Message):
    __slots__ = ("node_id", "present", "generation", "tiers", "tier_bytes", "tier_entries", "full_entries", "num_tokens", "next_position", "pending_ids", "ancestors", "view", "policy", "ttl_ms", "pinned", "tier_quality", "codec_quality")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TIER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FULL_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    PENDING_IDS_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TIER_QUALITY_FIELD_NUMBER: _ClassVar[int]
    CODEC_QUALITY_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    present: bool
    generation: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    tier_bytes: _containers.RepeatedScalarFieldContainer[int]
    tier_entries: _containers.RepeatedScalarFieldContainer[int]
    full_entries: int
    num_tokens: int
    next_position: int
    pending_ids: _containers.RepeatedScalarFieldContainer[int]
    ancestors: _containers.RepeatedScalarFieldContainer[str]
    view: _containers.RepeatedScalarFieldContainer[str]
    policy: str
    ttl_ms: int
    pinned: bool
    tier_quality: _containers.RepeatedCompositeFieldContainer[TierQuality]
    codec_quality: CodecQuality
    def __init__(self, node_id: _Optional[str] = ..., present: _Optional[bool] = ..., generation: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., tier_bytes: _Optional[_Iterable[int]] = ..., tier_entries: _Optional[_Iterable[int]] = ..., full_entries: _Optional[int] = ..., num_tokens: _Optional[int] = ..., next_position: _Optional[int] = ..., pending_ids: _Optional[_Iterable[int]] = ..., ancestors: _Optional[_Iterable[str]] = ..., view: _Optional[_Iterable[str]] = ..., policy: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., pinned: _Optional[bool] = ..., tier_quality: _Optional[_Iterable[_Union[TierQuality, _Mapping]]] = ..., codec_quality: _Optional[_Union[CodecQuality, _Mapping]] = ...) -> None: ...

class TierQuality(_message.Message):
    __slots__ = ("retained_mass", "lowest_mass", "low_mass_share", "theta")
    RETAINED_MASS_FIELD_NUMBER: _ClassVar[int]
    LOWEST_MASS_FIELD_NUMBER: _ClassVar[int]
    LOW_MASS_SHARE_FIELD_NUMBER: _ClassVar[int]
    THETA_FIELD_NUMBER: _ClassVar[int]
    retained_mass: float
    lowest_mass: float
    low_mass_share: float
    theta: float
    def __init__(self, retained_mass: _Optional[float] = ..., lowest_mass: _Optional[float] = ..., low_mass_share: _Optional[float] = ..., theta: _Optional[float] = ...) -> None: ...

class CodecQuality(_message.Message):
    __slots__ = ("key_error", "value_error", "kl")
    KEY_ERROR_FIELD_NUMBER: _ClassVar[int]
    VALUE_ERROR_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    key_error: float
    value_error: float
    kl: float
    def __init__(self, key_error: _Optional[float] = ..., value_error: _Optional[float] = ..., kl: _Optional[float] = ...) -> None: ...

class DeleteNodeRequest(_message.Message):
    __slots__ = ("node_id", "expected_attempt", "unreferenced", "expected_generation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    UNREFERENCED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    expected_attempt: str
    unreferenced: bool
    expected_generation: int
    def __init__(self, node_id: _Optional[str] = ..., expected_attempt: _Optional[str] = ..., unreferenced: _Optional[bool] = ..., expected_generation: _Optional[int] = ...) -> None: ...

class LinkBetterRequest(_message.Message):
    __slots__ = ("node_id", "better_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BETTER_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    better_id: str
    def __init__(self, node_id: _Optional[str] = ..., better_id: _Optional[str] = ...) -> None: ...

class LinkBetterResponse(_message.Message):
    __slots__ = ("linked",)
    LINKED_FIELD_NUMBER: _ClassVar[int]
    linked: bool
    def __init__(self, linked: _Optional[bool] = ...) -> None: ...

class DeleteNodeResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: _Optional[bool] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("tenant", "node_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    node_id: str
    def __init__(self, tenant: _Optional[str] = ..., node_id: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: int
    def __init__(self, pins: _Optional[int] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("node_id", "ttl_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    ttl_ms: int
    def __init__(self, node_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: bool
    def __init__(self, present: _Optional[bool] = ...) -> None: ...

class Handle(_message.Message):
    __slots__ = ("handle", "tenant", "node_id", "metadata", "created_at", "ttl_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    handle: str
    tenant: str
    node_id: str
    metadata: bytes
    created_at: int
    ttl_ms: int
    def __init__(self, handle: _Optional[str] = ..., tenant: _Optional[str] = ..., node_id: _Optional[str] = ..., metadata: _Optional[bytes] = ..., created_at: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class BindHandleRequest(_message.Message):
    __slots__ = ("handle", "tenant", "node_id", "metadata", "ttl_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    handle: str
    tenant: str
    node_id: str
    metadata: bytes
    ttl_ms: int
    def __init__(self, handle: _Optional[str] = ..., tenant: _Optional[str] = ..., node_id: _Optional[str] = ..., metadata: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class MoveHandleRequest(_message.Message):
    __slots__ = ("tenant", "handle", "from_node", "to_node", "metadata")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FROM_NODE_FIELD_NUMBER: _ClassVar[int]
    TO_NODE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    handle: str
    from_node: str
    to_node: str
    metadata: bytes
    def __init__(self, tenant: _Optional[str] = ..., handle: _Optional[str] = ..., from_node: _Optional[str] = ..., to_node: _Optional[str] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class MoveHandleResponse(_message.Message):
    __slots__ = ("outcome",)
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[MoveHandleResponse.Outcome]
        MOVED: _ClassVar[MoveHandleResponse.Outcome]
        HAS_CHILDREN: _ClassVar[MoveHandleResponse.Outcome]
        ELSEWHERE: _ClassVar[MoveHandleResponse.Outcome]
    OUTCOME_UNSPECIFIED: MoveHandleResponse.Outcome
    MOVED: MoveHandleResponse.Outcome
    HAS_CHILDREN: MoveHandleResponse.Outcome
    ELSEWHERE: MoveHandleResponse.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: MoveHandleResponse.Outcome
    def __init__(self, outcome: _Optional[_Union[MoveHandleResponse.Outcome, str]] = ...) -> None: ...

class ResolveHandleRequest(_message.Message):
    __slots__ = ("tenant", "handle")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    handle: str
    def __init__(self, tenant: _Optional[str] = ..., handle: _Optional[str] = ...) -> None: ...

class ListHandlesRequest(_message.Message):
    __slots__ = ("tenant", "prefix", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    prefix: str
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., prefix: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListHandlesResponse(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedCompositeFieldContainer[Handle]
    def __init__(self, handles: _Optional[_Iterable[_Union[Handle, _Mapping]]] = ...) -> None: ...

class DeleteHandleRequest(_message.Message):
    __slots__ = ("tenant", "handle")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    handle: str
    def __init__(self, tenant: _Optional[str] = ..., handle: _Optional[str] = ...) -> None: ...

class DeleteHandleResponse(_message.Message):
    __slots__ = ("deleted_nodes",)
    DELETED_NODES_FIELD_NUMBER: _ClassVar[int]
    deleted_nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, deleted_nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginRequestRequest(_message.Message):
    __slots__ = ("tenant", "key_digest", "request_digest", "handle", "lease_ms", "ttl_ms", "lease_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key_digest: str
    request_digest: str
    handle: str
    lease_ms: int
    ttl_ms: int
    lease_token: str
    def __init__(self, tenant: _Optional[str] = ..., key_digest: _Optional[str] = ..., request_digest: _Optional[str] = ..., handle: _Optional[str] = ..., lease_ms: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., lease_token: _Optional[str] = ...) -> None: ...

class BeginRequestResponse(_message.Message):
    __slots__ = ("state", "handle", "answer", "lease_token")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[BeginRequestResponse.State]
        RUN: _ClassVar[BeginRequestResponse.State]
        RUNNING: _ClassVar[BeginRequestResponse.State]
        DONE: _ClassVar[BeginRequestResponse.State]
    STATE_UNSPECIFIED: BeginRequestResponse.State
    RUN: BeginRequestResponse.State
    RUNNING: BeginRequestResponse.State
    DONE: BeginRequestResponse.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    state: BeginRequestResponse.State
    handle: str
    answer: bytes
    lease_token: str
    def __init__(self, state: _Optional[_Union[BeginRequestResponse.State, str]] = ..., handle: _Optional[str] = ..., answer: _Optional[bytes] = ..., lease_token: _Optional[str] = ...) -> None: ...

class FinishRequestRequest(_message.Message):
    __slots__ = ("tenant", "key_digest", "lease_token", "answer")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key_digest: str
    lease_token: str
    answer: bytes
    def __init__(self, tenant: _Optional[str] = ..., key_digest: _Optional[str] = ..., lease_token: _Optional[str] = ..., answer: _Optional[bytes] = ...) -> None: ...

class FinishRequestResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    def __init__(self, stored: _Optional[bool] = ...) -> None: ...

class AliasTarget(_message.Message):
    __slots__ = ("node_id", "view")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    view: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., view: _Optional[_Iterable[str]] = ...) -> None: ...

class PutAliasRequest(_message.Message):
    __slots__ = ("alias", "target")
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    alias: str
    target: AliasTarget
    def __init__(self, alias: _Optional[str] = ..., target: _Optional[_Union[AliasTarget, _Mapping]] = ...) -> None: ...

class PutAliasResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResolveAliasesRequest(_message.Message):
    __slots__ = ("aliases",)
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class ResolveAliasesResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AliasEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AliasEntry, _Mapping]]] = ...) -> None: ...

class AliasEntry(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[AliasTarget]
    def __init__(self, targets: _Optional[_Iterable[_Union[AliasTarget, _Mapping]]] = ...) -> None: ...

class GetTokenRecordsRequest(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetTokenRecordsResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("node_id", "ttl_ms", "lease_token")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    ttl_ms: int
    lease_token: str
    def __init__(self, node_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., lease_token: _Optional[str] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("acquired", "lease_token", "held_for_ms")
    ACQUIRED_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HELD_FOR_MS_FIELD_NUMBER: _ClassVar[int]
    acquired: bool
    lease_token: str
    held_for_ms: int
    def __init__(self, acquired: _Optional[bool] = ..., lease_token: _Optional[str] = ..., held_for_ms: _Optional[int] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("node_id", "lease_token")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease_token: str
    def __init__(self, node_id: _Optional[str] = ..., lease_token: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...
