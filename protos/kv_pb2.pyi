from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerSpec(_message.Message):
    __slots__ = ("kind", "kv_heads", "k_dim", "v_dim", "window")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_DIM_FIELD_NUMBER: _ClassVar[int]
    V_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    kind: str
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int
    def __init__(self, kind: _Optional[str] = ..., kv_heads: _Optional[int] = ..., k_dim: _Optional[int] = ..., v_dim: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class PoolFormat(_message.Message):
    __slots__ = ("block_size", "dtype", "tp_size", "tp_rank", "codecs")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    dtype: str
    tp_size: int
    tp_rank: int
    codecs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., tp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., codecs: _Optional[_Iterable[str]] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("name", "address", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("boot_id", "protocol_version", "layout_fingerprint", "format", "lanes", "ranks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    protocol_version: int
    layout_fingerprint: str
    format: PoolFormat
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    ranks: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, boot_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., layout_fingerprint: _Optional[str] = ..., format: _Optional[_Union[PoolFormat, _Mapping]] = ..., lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class KVHandle(_message.Message):
    __slots__ = ("boot_id", "export_seq", "request_id", "sample", "epoch", "num_tokens", "secret", "endpoint", "lease_ms")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EXPORT_SEQ_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    export_seq: int
    request_id: str
    sample: int
    epoch: int
    num_tokens: int
    secret: bytes
    endpoint: Endpoint
    lease_ms: int
    def __init__(self, boot_id: _Optional[str] = ..., export_seq: _Optional[int] = ..., request_id: _Optional[str] = ..., sample: _Optional[int] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., secret: _Optional[bytes] = ..., endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "boot_id", "layout_fingerprint", "format", "nonce", "mac")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_id: str
    layout_fingerprint: str
    format: PoolFormat
    nonce: bytes
    mac: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., boot_id: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., format: _Optional[_Union[PoolFormat, _Mapping]] = ..., nonce: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("export_seq", "secret", "request_id", "epoch", "start_token", "codec", "windowed", "timeout_ms", "adopt")
    EXPORT_SEQ_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    export_seq: int
    secret: bytes
    request_id: str
    epoch: int
    start_token: int
    codec: str
    windowed: bool
    timeout_ms: int
    adopt: bool
    def __init__(self, export_seq: _Optional[int] = ..., secret: _Optional[bytes] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., start_token: _Optional[int] = ..., codec: _Optional[str] = ..., windowed: bool = ..., timeout_ms: _Optional[int] = ..., adopt: bool = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("block_size", "tables")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    def __init__(self, block_size: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("sample", "position", "token_id", "logprobs", "finish_reason", "cumulative_logprob", "drafts")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    position: int
    token_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: str
    cumulative_logprob: float
    drafts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., cumulative_logprob: _Optional[float] = ..., drafts: _Optional[_Iterable[int]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("num_tokens", "lease_held", "first_tokens", "num_frames", "waited_ms", "lease_ms")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_HELD_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    lease_held: bool
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    num_frames: int
    waited_ms: int
    lease_ms: int
    def __init__(self, num_tokens: _Optional[int] = ..., lease_held: bool = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., num_frames: _Optional[int] = ..., waited_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("export_seq", "part", "answer")
    EXPORT_SEQ_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    export_seq: int
    part: bool
    answer: bool
    def __init__(self, export_seq: _Optional[int] = ..., part: bool = ..., answer: bool = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("export_seq", "secret", "epoch")
    EXPORT_SEQ_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    export_seq: int
    secret: bytes
    epoch: int
    def __init__(self, export_seq: _Optional[int] = ..., secret: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("export_seq", "secret", "epoch", "held")
    EXPORT_SEQ_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    export_seq: int
    secret: bytes
    epoch: int
    held: bool
    def __init__(self, export_seq: _Optional[int] = ..., secret: _Optional[bytes] = ..., epoch: _Optional[int] = ..., held: bool = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class RawFrame(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
