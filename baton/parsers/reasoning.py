"""Reasoning between tags at the start of an answer, which may begin without its opening tag.

Chat templates differ: the model writes `<think>` itself, or its prompt ends with `<think>`, or its
prompt ends with `</think>` (thinking switched off). A tag at the prompt's end decides whether the
answer begins within reasoning; without such a tag the format decides. If the closing tag never
comes, the answer was cut short, and all of it is reasoning. A call may be made within reasoning;
the text after it is reasoning up to the closing tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from baton.parsers import harmony
from baton.parsers.grammar import Form, Grammar
from baton.parsers.parts import Sink
from baton.parsers.reader import Steps, TextReader

Kwargs = Mapping[str, Any]
OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def _never(_: Kwargs) -> bool:
    return False


def _always(_: Kwargs) -> bool:
    return True


def _unless_off(kwargs: Kwargs) -> bool:
    return kwargs.get("enable_thinking") is not False


def _if_on(kwargs: Kwargs) -> bool:
    return bool(kwargs.get("thinking") or kwargs.get("enable_thinking"))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of reasoning. The first tag of `open` and of `close` is the usual one.

    `begins(chat_template_kwargs)`: whether an answer without an opening tag is reasoning. `around`:
    tags that some models write around the content after the reasoning; they are left out. `calls`:
    models may call a tool within the reasoning. `whole`: the grammar that reads whole answers, if
    reasoning and calls are one format, else None. `answer(form)`: the form of a whole answer whose
    content must have `form`, for a format with `whole`.
    """

    name: str
    begins: Callable[[Kwargs], bool] = _never
    open: tuple[str, ...] = (OPEN,)
    close: tuple[str, ...] = (CLOSE,)
    around: tuple[str, ...] = ()
    calls: bool = False
    whole: Grammar | None = None
    answer: Callable[[Form], Form] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the tokenizer must show even if they are special tokens."""
        if self.whole is not None:
            return harmony.MARKERS
        return self.open + self.close + self.around

    @property
    def can_end(self) -> bool:
        """Whether a thought can be ended by writing the closing tag on the model's behalf."""
        return self.whole is None

    def opened(self, prompt: str, kwargs: Kwargs) -> bool:
        """Whether an answer to `prompt` without an opening tag starts within reasoning."""
        if self.whole is not None:
            return False
        end = prompt.rstrip()
        if end.endswith(tuple(tag.rstrip() for tag in self.open)):
            return True
        return not end.endswith(self.close) and self.begins(kwargs)

    def opened_by(self, message: str) -> bool:
        """Whether an answer that continues the assistant's `message` starts within reasoning."""
        if self.whole is not None:
            return False
        return max(map(message.rfind, self.open)) > max(map(message.rfind, self.close))


def read(
    reader: TextReader, sink: Sink, form: ReasoningFormat, opened: bool, calls: tuple[str, ...] = ()
) -> Steps[None]:
    """Read the reasoning with its tags, if the answer starts with reasoning.

    `calls` are the marks of calls that may interrupt the reasoning.
    """
    space = yield from reader.space()
    tagged = False
    for mark in form.open:
        tagged = tagged or (yield from reader.literal(mark))
    if not tagged and not opened:
        sink.content(space)
        return
    sink.thinking = True
    if space and not tagged:
        sink.reasoning(space)
    mark = yield from reader.until(form.close + calls, sink.reasoning)
    if mark in calls:
        reader.unread(mark)
        sink.interrupted(form.close)
    else:
        sink.thinking = False


QWEN3: Final = ReasoningFormat("qwen3", _unless_off, calls=True)
DEEPSEEK_R1: Final = ReasoningFormat("deepseek_r1", _always)
DEEPSEEK_V3: Final = ReasoningFormat("deepseek_v3", _if_on)
OPENAI_GPTOSS: Final = ReasoningFormat(
    "openai_gptoss",
    open=(harmony.ANALYSIS,),
    close=(harmony.END,),
    whole=harmony.read,
    answer=harmony.final,
)
HY_V3: Final = ReasoningFormat("hy_v3")


def _tagged(
    name: str, open_: tuple[str, ...], close: tuple[str, ...], around: tuple[str, ...] = ()
) -> ReasoningFormat:
    """Return a format whose opening tag the model always writes, or finds at its prompt's end."""
    return ReasoningFormat(name, open=open_, close=close, around=around, calls=True)


def _think(name: str, around: tuple[str, ...] = ()) -> ReasoningFormat:
    return _tagged(name, (OPEN,), (CLOSE,), around)


THINK_TAGS: Final = _think("think_tags")
# The formats by the names that an operator may give: vLLM's names, and some further ones.
REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    form.name: form
    for form in (
        QWEN3, DEEPSEEK_R1, DEEPSEEK_V3, OPENAI_GPTOSS, HY_V3, THINK_TAGS,
        replace(DEEPSEEK_R1, name="step3"), replace(DEEPSEEK_R1, name="step5"),
        replace(DEEPSEEK_V3, name="deepseek_v4"), replace(QWEN3, name="holo2"),
        *map(_think, (
            "glm45", "glm47", "kimi_k2", "minimax_m2", "nemotron_v3", "step3p5", "olmo3", "mimo",
            "poolside_v1", "ling3", "granite_thinking_parser",
        )),
        _think("hunyuan_a13b", ("<answer>", "</answer>")),
        replace(_think("ernie45", ("<response>", "</response>")), begins=_always),
        _tagged("seed_oss", ("<seed:think>",), ("</seed:think>",)),
        _tagged("minimax_m3", ("<mm:think>",), ("</mm:think>",)),
        _tagged("mistral", ("[THINK]",), ("[/THINK]",)),
        _tagged("kimi_vl", ("◁think▷",), ("◁/think▷",)),
        _tagged("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",)),
        _tagged("gemma4", ("<|channel>thought\n", "<|channel>thought"), ("<channel|>",)),
        _tagged(
            "granite",
            ("Here is my thought process:", "Here's my thought process:", "<think>"),
            ("Here is my response:", "Here's my response:", "</think>"),
            ("<response>", "</response>"),
        ),
        _tagged(
            "cohere_command3", ("<|START_THINKING|>",), ("<|END_THINKING|>",),
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        _tagged(
            "solar_open", ("<|think|>",), ("<|end|>",),
            ("<|begin|>assistant", "<|content|>", "<|end|>"),
        ),
    )
}  # fmt: skip
REASONING_FORMATS["cohere_command4"] = REASONING_FORMATS["cohere_command3"]
