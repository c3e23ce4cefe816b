"""RouterServices: the parts of one router that its HTTP and gRPC APIs use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.protocol.clock import Clock, SystemClock
from baton.text.generation_config import SamplingDefaults
from router.events import EventRing

if TYPE_CHECKING:
    from baton.images.model import ImageModel
    from baton.text.chat_template import ChatTemplate
    from baton.text.sentence_files import SentenceFiles
    from baton.text.tokenizer import Tokenizer
    from router.batches.runner import BatchRunner
    from router.config import RouterConfig
    from router.metrics.router import RouterMetrics
    from router.nodes.registry import NodeRegistry
    from router.request.aborts import Aborts
    from router.request.dispatcher import Dispatcher
    from router.request.pool import Pools
    from router.request.timeline import TimelineRing
    from router.resumable.runs import Runs
    from router.store.guard import StoreGuard


@dataclass(slots=True)
class Lifecycle:
    """Whether the router still takes new requests. router/main.py sets `draining` at a signal,
    router/admin/server.py when an operator asks for it."""

    draining: bool = False


@dataclass(frozen=True, slots=True)
class RouterServices:
    """The parts that an API may use.

    The served model is `registry.model()` (None until a node has registered): name, digest,
    max_model_len, vocab_size, eos_token_ids. `sampling_defaults` stand in for sampling fields
    that a request does not set.
    """

    config: RouterConfig
    dispatcher: Dispatcher
    registry: NodeRegistry
    store: StoreGuard
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    metrics: RouterMetrics
    aborts: Aborts
    sampling_defaults: SamplingDefaults = field(default_factory=dict[str, int | float])
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    clock: Clock = field(default_factory=SystemClock)
    runs: Runs | None = None  # resumable requests; None: they are refused
    pools: Pools | None = None  # computes embeddings and scores; None: the registry's nodes do
    timelines: TimelineRing | None = None  # of ended requests; None: none are kept
    batches: BatchRunner | None = None  # None: /v1/files and /v1/batches are not served
    events: EventRing = field(default_factory=EventRing)
    encoder: SentenceFiles | None = None  # set if the model is one: it writes no text
    images: ImageModel | None = None  # None: the model reads no images

    @property
    def ready(self) -> bool:
        return not self.lifecycle.draining and self.registry.can_serve()
