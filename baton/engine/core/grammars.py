"""What the engine does with grammars: it keeps them, waits for them and gives sequences their
guides.

Compiling and following a grammar is in baton/guided; writing masks on logits in running/masks.py.
"""

from __future__ import annotations

from baton.engine.checkpoint.checkpoint import open_checkpoint
from baton.engine.config import EngineConfig
from baton.engine.state.interface import ModelInfo
from baton.engine.state.sequence import RequestGroup
from baton.guided.cache import GrammarCache
from baton.guided.guide import Grammar
from baton.guided.spec import FIELD, check_size
from baton.guided.vocabulary import Vocabulary, load_vocabulary
from baton.protocol.errors import UnsupportedFeature
from baton.protocol.request import Request
from baton.protocol.sampling import GuidedDecoding


def grammars_of(config: EngineConfig, info: ModelInfo) -> GrammarCache:
    """Return the grammars of an engine over a checkpoint. Reads nothing yet."""

    def load() -> Vocabulary:
        return load_vocabulary(
            open_checkpoint(config.model).path, info.vocab_size, info.eos_token_ids
        )

    return GrammarCache(load)


def refuse_unguided(request: Request, grammars: GrammarCache | None) -> None:
    """Refuse a guided request that cannot be served.

    Raises InvalidRequest for a grammar that is visibly invalid, and UnsupportedFeature if there is
    no vocabulary.
    """
    guided = request.params.guided
    if guided is None:
        return
    check_size(guided)
    if grammars is None:
        raise UnsupportedFeature("guided: this engine has no tokenizer", field=FIELD)


async def prepared(grammars: GrammarCache | None, guided: GuidedDecoding | None) -> Grammar | None:
    """Wait, from asyncio, for the grammar of a request, so that `guide` need not wait.

    Keep the result until then: while it is held, the cache does not forget the grammar. None if
    there is nothing to prepare. Raises the errors of `GrammarCache.get`.
    """
    if guided is None or grammars is None:
        return None
    return await grammars.prepared(guided)


def guide(group: RequestGroup, grammars: GrammarCache | None) -> None:
    """Give each sequence of a guided request its guide.

    Waits for the grammar, unless it was `prepared`. Raises the errors of `GrammarCache.get`.
    """
    guided = group.request.params.guided
    if guided is None or grammars is None:
        return
    grammar = grammars.get(guided)
    for sequence in group.sequences:
        sequence.guide = grammar.guide()
