from protos import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_ENCODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_ENCODE: Role

class GuidedDecoding(_message.Message):
    __slots__ = ("kind", "grammar", "backend", "whitespace", "starts_after", "most_thought", "thought_start")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    STARTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    MOST_THOUGHT_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_START_FIELD_NUMBER: _ClassVar[int]
    kind: str
    grammar: str
    backend: str
    whitespace: str
    starts_after: str
    most_thought: int
    thought_start: str
    def __init__(self, kind: _Optional[str] = ..., grammar: _Optional[str] = ..., backend: _Optional[str] = ..., whitespace: _Optional[str] = ..., starts_after: _Optional[str] = ..., most_thought: _Optional[int] = ..., thought_start: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("n", "best_of", "beam_width", "length_penalty", "early_stopping", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "logprobs", "prompt_logprobs", "guided", "allowed_token_ids", "logprob_token_ids", "skip_reading_prefix_cache")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    logprobs: int
    prompt_logprobs: int
    guided: GuidedDecoding
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_reading_prefix_cache: bool
    def __init__(self, n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., guided: _Optional[_Union[GuidedDecoding, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., skip_reading_prefix_cache: bool = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "prompt_ids", "output_ids", "params", "adapter", "priority", "tenant_salt", "deadline_ms", "epoch", "traceparent", "resume", "ended", "images")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    params: SamplingParams
    adapter: str
    priority: int
    tenant_salt: str
    deadline_ms: int
    epoch: int
    traceparent: str
    resume: str
    ended: _containers.RepeatedScalarFieldContainer[int]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., tenant_salt: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., epoch: _Optional[int] = ..., traceparent: _Optional[str] = ..., resume: _Optional[str] = ..., ended: _Optional[_Iterable[int]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("digest", "start", "num_tokens", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    start: int
    num_tokens: int
    data: bytes
    def __init__(self, digest: _Optional[bytes] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "swapped", "free_blocks", "total_blocks", "waiting_tokens", "fetching", "export_bytes", "step_seconds", "prefill_tokens_per_s", "draining", "kv_received_bytes", "kv_sent_bytes", "kv_fetches", "kv_fetch_failures", "preemptions", "prefix_query_tokens", "prefix_hit_tokens", "kv_token_bytes", "kv_tail_seconds", "stalled", "mbu", "mfu", "kv_adopted_bytes", "pause", "asleep", "steps", "step_tokens", "cached_blocks", "own_prefill_tokens_per_s")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHING_FIELD_NUMBER: _ClassVar[int]
    EXPORT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_FETCHES_FIELD_NUMBER: _ClassVar[int]
    KV_FETCH_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_TAIL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    MBU_FIELD_NUMBER: _ClassVar[int]
    MFU_FIELD_NUMBER: _ClassVar[int]
    KV_ADOPTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWN_PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    swapped: int
    free_blocks: int
    total_blocks: int
    waiting_tokens: int
    fetching: int
    export_bytes: int
    step_seconds: float
    prefill_tokens_per_s: float
    draining: bool
    kv_received_bytes: int
    kv_sent_bytes: int
    kv_fetches: int
    kv_fetch_failures: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    kv_token_bytes: int
    kv_tail_seconds: float
    stalled: bool
    mbu: float
    mfu: float
    kv_adopted_bytes: int
    pause: str
    asleep: bool
    steps: int
    step_tokens: int
    cached_blocks: int
    own_prefill_tokens_per_s: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., swapped: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., fetching: _Optional[int] = ..., export_bytes: _Optional[int] = ..., step_seconds: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., draining: bool = ..., kv_received_bytes: _Optional[int] = ..., kv_sent_bytes: _Optional[int] = ..., kv_fetches: _Optional[int] = ..., kv_fetch_failures: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., kv_token_bytes: _Optional[int] = ..., kv_tail_seconds: _Optional[float] = ..., stalled: bool = ..., mbu: _Optional[float] = ..., mfu: _Optional[float] = ..., kv_adopted_bytes: _Optional[int] = ..., pause: _Optional[str] = ..., asleep: bool = ..., steps: _Optional[int] = ..., step_tokens: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., own_prefill_tokens_per_s: _Optional[float] = ...) -> None: ...

class NodeRecord(_message.Message):
    __slots__ = ("node_id", "boot_id", "role", "address", "model", "model_digest", "block_size", "max_model_len", "vocab_size", "endpoint", "load", "version", "adapters", "eos_token_ids", "max_num_seqs", "precision", "deterministic", "group", "rank", "encodes", "needs_rows", "leaving_adapters")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENCODES_FIELD_NUMBER: _ClassVar[int]
    NEEDS_ROWS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: str
    role: Role
    address: str
    model: str
    model_digest: str
    block_size: int
    max_model_len: int
    vocab_size: int
    endpoint: _kv_pb2.Endpoint
    load: Load
    version: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_num_seqs: int
    precision: str
    deterministic: bool
    group: str
    rank: int
    encodes: bool
    needs_rows: bool
    leaving_adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., endpoint: _Optional[_Union[_kv_pb2.Endpoint, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., version: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_num_seqs: _Optional[int] = ..., precision: _Optional[str] = ..., deterministic: bool = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., encodes: bool = ..., needs_rows: bool = ..., leaving_adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("kind", "hashes", "parent", "states")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STORED: _ClassVar[BlockEvent.Kind]
        EVICTED: _ClassVar[BlockEvent.Kind]
        CLEARED: _ClassVar[BlockEvent.Kind]
    STORED: BlockEvent.Kind
    EVICTED: BlockEvent.Kind
    CLEARED: BlockEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    kind: BlockEvent.Kind
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    states: bool
    def __init__(self, kind: _Optional[_Union[BlockEvent.Kind, str]] = ..., hashes: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., states: bool = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("router_id", "protocol_version", "nonce")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_version: int
    nonce: bytes
    def __init__(self, router_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "prefill", "decode", "pool", "encode", "encoded")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    request: Request
    prefill: PrefillTask
    decode: DecodeTask
    pool: PoolTask
    encode: EncodeTask
    encoded: _containers.RepeatedCompositeFieldContainer[EncodedImage]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., prefill: _Optional[_Union[PrefillTask, _Mapping]] = ..., decode: _Optional[_Union[DecodeTask, _Mapping]] = ..., pool: _Optional[_Union[PoolTask, _Mapping]] = ..., encode: _Optional[_Union[EncodeTask, _Mapping]] = ..., encoded: _Optional[_Iterable[_Union[EncodedImage, _Mapping]]] = ...) -> None: ...

class PrefillTask(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncodeTask(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncodedImage(_message.Message):
    __slots__ = ("digest", "height", "width", "handle")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    height: int
    width: int
    handle: _kv_pb2.KVHandle
    def __init__(self, digest: _Optional[bytes] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., handle: _Optional[_Union[_kv_pb2.KVHandle, _Mapping]] = ...) -> None: ...

class PoolTask(_message.Message):
    __slots__ = ("lengths", "kind", "normalize", "dimensions", "yes_id", "no_id", "second_from")
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    YES_ID_FIELD_NUMBER: _ClassVar[int]
    NO_ID_FIELD_NUMBER: _ClassVar[int]
    SECOND_FROM_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    kind: str
    normalize: bool
    dimensions: int
    yes_id: int
    no_id: int
    second_from: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lengths: _Optional[_Iterable[int]] = ..., kind: _Optional[str] = ..., normalize: bool = ..., dimensions: _Optional[int] = ..., yes_id: _Optional[int] = ..., no_id: _Optional[int] = ..., second_from: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeTask(_message.Message):
    __slots__ = ("handle", "prefilling")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    handle: _kv_pb2.KVHandle
    prefilling: bool
    def __init__(self, handle: _Optional[_Union[_kv_pb2.KVHandle, _Mapping]] = ..., prefilling: bool = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RenewExport(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: _kv_pb2.KVHandle
    def __init__(self, handle: _Optional[_Union[_kv_pb2.KVHandle, _Mapping]] = ...) -> None: ...

class ReleaseExport(_message.Message):
    __slots__ = ("handle", "why")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    handle: _kv_pb2.KVHandle
    why: str
    def __init__(self, handle: _Optional[_Union[_kv_pb2.KVHandle, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: str
    def __init__(self, mode: _Optional[str] = ...) -> None: ...

class Migrate(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class StopSample(_message.Message):
    __slots__ = ("request_id", "epoch", "sample")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    sample: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sample: _Optional[int] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("number", "action", "name", "path", "in_place", "tags", "mode")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    number: int
    action: str
    name: str
    path: str
    in_place: bool
    tags: _containers.RepeatedScalarFieldContainer[str]
    mode: str
    def __init__(self, number: _Optional[int] = ..., action: _Optional[str] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., in_place: bool = ..., tags: _Optional[_Iterable[str]] = ..., mode: _Optional[str] = ...) -> None: ...

class RouterBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[RouterMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[RouterMessage, _Mapping]]] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "abort", "renew", "release", "drain", "migrate", "stop_sample", "batch", "prefilled", "control")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    STOP_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: Submit
    abort: Abort
    renew: RenewExport
    release: ReleaseExport
    drain: Drain
    migrate: Migrate
    stop_sample: StopSample
    batch: RouterBatch
    prefilled: Prefilled
    control: Control
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., renew: _Optional[_Union[RenewExport, _Mapping]] = ..., release: _Optional[_Union[ReleaseExport, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., migrate: _Optional[_Union[Migrate, _Mapping]] = ..., stop_sample: _Optional[_Union[StopSample, _Mapping]] = ..., batch: _Optional[_Union[RouterBatch, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., control: _Optional[_Union[Control, _Mapping]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("request_id", "epoch", "sample", "position", "token_ids", "logprobs", "finish_reason", "num_cached_tokens", "stop_token_id", "has_stop_token", "prompt_logprobs", "preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    sample: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    num_cached_tokens: int
    stop_token_id: int
    has_stop_token: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sample: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., has_stop_token: bool = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., preemptions: _Optional[int] = ...) -> None: ...

class NodeSpan(_message.Message):
    __slots__ = ("name", "start_us", "end_us", "chunks", "kv_bytes", "lane", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_us: int
    end_us: int
    chunks: int
    kv_bytes: int
    lane: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ..., chunks: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., lane: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class NodeTimings(_message.Message):
    __slots__ = ("request_id", "epoch", "age_us", "spans")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    age_us: int
    spans: _containers.RepeatedCompositeFieldContainer[NodeSpan]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., age_us: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[NodeSpan, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("top",)
    TOP_FIELD_NUMBER: _ClassVar[int]
    top: _containers.RepeatedCompositeFieldContainer[_kv_pb2.TokenLogprob]
    def __init__(self, top: _Optional[_Iterable[_Union[_kv_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class HandleReady(_message.Message):
    __slots__ = ("request_id", "epoch", "handle")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    handle: _kv_pb2.KVHandle
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., handle: _Optional[_Union[_kv_pb2.KVHandle, _Mapping]] = ...) -> None: ...

class Subscribed(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Pooled(_message.Message):
    __slots__ = ("request_id", "epoch", "vectors")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    vectors: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., vectors: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Encoded(_message.Message):
    __slots__ = ("request_id", "epoch", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    images: _containers.RepeatedCompositeFieldContainer[EncodedImage]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., images: _Optional[_Iterable[_Union[EncodedImage, _Mapping]]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request_id", "epoch", "code", "message", "retryable", "field")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    code: str
    message: str
    retryable: bool
    field: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ..., field: _Optional[str] = ...) -> None: ...

class Controlled(_message.Message):
    __slots__ = ("number", "code", "message", "field", "detail")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    number: int
    code: str
    message: str
    field: str
    detail: bytes
    def __init__(self, number: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., detail: _Optional[bytes] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("held", "leaving")
    HELD_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[str]
    leaving: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, held: _Optional[_Iterable[str]] = ..., leaving: _Optional[_Iterable[str]] = ...) -> None: ...

class KvFlow(_message.Message):
    __slots__ = ("peer", "lane", "bytes", "transfers", "faults", "ms_p50", "ms_p99")
    PEER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    MS_P50_FIELD_NUMBER: _ClassVar[int]
    MS_P99_FIELD_NUMBER: _ClassVar[int]
    peer: str
    lane: str
    bytes: int
    transfers: int
    faults: int
    ms_p50: float
    ms_p99: float
    def __init__(self, peer: _Optional[str] = ..., lane: _Optional[str] = ..., bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., faults: _Optional[int] = ..., ms_p50: _Optional[float] = ..., ms_p99: _Optional[float] = ...) -> None: ...

class NodeStep(_message.Message):
    __slots__ = ("tokens", "handles", "subscribed", "failed", "load", "block_events_seq", "block_events", "last", "pooled", "controlled", "adapters", "flows", "no_logprobs", "timings", "encoded")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_SEQ_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    CONTROLLED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    NO_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    handles: _containers.RepeatedCompositeFieldContainer[HandleReady]
    subscribed: _containers.RepeatedCompositeFieldContainer[Subscribed]
    failed: _containers.RepeatedCompositeFieldContainer[RequestFailed]
    load: Load
    block_events_seq: int
    block_events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    last: bool
    pooled: _containers.RepeatedCompositeFieldContainer[Pooled]
    controlled: _containers.RepeatedCompositeFieldContainer[Controlled]
    adapters: AdapterList
    flows: _containers.RepeatedCompositeFieldContainer[KvFlow]
    no_logprobs: bool
    timings: _containers.RepeatedCompositeFieldContainer[NodeTimings]
    encoded: _containers.RepeatedCompositeFieldContainer[Encoded]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ..., handles: _Optional[_Iterable[_Union[HandleReady, _Mapping]]] = ..., subscribed: _Optional[_Iterable[_Union[Subscribed, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[RequestFailed, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., block_events_seq: _Optional[int] = ..., block_events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., last: bool = ..., pooled: _Optional[_Iterable[_Union[Pooled, _Mapping]]] = ..., controlled: _Optional[_Iterable[_Union[Controlled, _Mapping]]] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., flows: _Optional[_Iterable[_Union[KvFlow, _Mapping]]] = ..., no_logprobs: bool = ..., timings: _Optional[_Iterable[_Union[NodeTimings, _Mapping]]] = ..., encoded: _Optional[_Iterable[_Union[Encoded, _Mapping]]] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("hello", "step")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    hello: NodeRecord
    step: NodeStep
    def __init__(self, hello: _Optional[_Union[NodeRecord, _Mapping]] = ..., step: _Optional[_Union[NodeStep, _Mapping]] = ...) -> None: ...
