"""Reasoning between tags at the start of an answer; how it may begin without its opening tag.

Templates differ: the model writes `<think>` itself, or its prompt ends with it, or its prompt ends
with `</think>` (thinking switched off). What the prompt ends with decides, if it does; else what
the format says. Without a closing tag everything is reasoning: the answer was cut short. A call
may be made within reasoning; what is said after it is reasoning as before, up to the same tag.
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
    """A format by name; the first tag of each kind is the usual one.

    `begins(chat_template_kwargs)`: an answer without an opening tag is reasoning. `calls`: models
    at times call a tool in mid-thought. `around`: tags that some models set around what they say
    then, and that are no content. `whole`: what reads such an answer to its end, where reasoning
    and calls are one format; `answer(form)`: what it must then look like to have content of a form.
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
        """What must reach this format also where it is special tokens."""
        if self.whole is not None:
            return harmony.MARKERS
        return self.open + self.close + self.around

    @property
    def can_end(self) -> bool:
        """Whether its closing tag, written for the model, ends a thought."""
        return self.whole is None

    def opened(self, prompt: str, kwargs: Kwargs) -> bool:
        """Whether an answer to `prompt` starts within reasoning, if it does not say so itself."""
        if self.whole is not None:
            return False
        end = prompt.rstrip()
        if end.endswith(tuple(tag.rstrip() for tag in self.open)):
            return True
        return not end.endswith(self.close) and self.begins(kwargs)

    def opened_by(self, message: str) -> bool:
        """The same for a message of the assistant's that is to be continued."""
        if self.whole is not None:
            return False
        return max(map(message.rfind, self.open)) > max(map(message.rfind, self.close))


def read(
    reader: TextReader, sink: Sink, form: ReasoningFormat, opened: bool, calls: tuple[str, ...] = ()
) -> Steps[None]:
    """Read the reasoning with its tags, if the answer starts with some. `calls`: marks at which it
    may be interrupted by a call."""
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
    """Tags that the model always writes itself, or finds at its prompt's end."""
    return ReasoningFormat(name, open=open_, close=close, around=around, calls=True)


def _think(name: str, around: tuple[str, ...] = ()) -> ReasoningFormat:
    return _tagged(name, (OPEN,), (CLOSE,), around)


THINK_TAGS: Final = _think("think_tags")
# By the names that may be given: vLLM's, and those of models that it has no name for.
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
