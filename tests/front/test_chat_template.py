"""Chat templates: equal to transformers' rendering; the sandbox holds; errors name `messages`."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.errors import InvalidRequest, ModelRefused
from baton.text.chat_template import Chat, ChatTemplate
from tests.front.tokenizers_built import TEMPLATE, byte_level, save

MESSAGES = [{"role": "user", "content": 'Say "hi" & <b>'}, {"role": "assistant", "content": "hi"}]
FEATURES = (
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m | tojson }}{{ [1, 2] | tojson(indent=2) }}{% generation %}x{% endgeneration %}"
    "{% endfor %}{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}"
    "{{ eos_token }}{{ pad_token }}{{ enable_thinking }}"
)


@pytest.mark.parametrize("source", [TEMPLATE, FEATURES])
@pytest.mark.parametrize("generation", [True, False])
def test_rendering_equals_that_of_transformers(
    tmp_path: Path, source: str, generation: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    directory = save(byte_level(), tmp_path, chat_template=source)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=generation, enable_thinking=False
    )
    ours = ChatTemplate.load(directory).render(
        Chat(MESSAGES, add_generation_prompt=generation, kwargs={"enable_thinking": False})
    )
    assert ours == expected


def test_the_jinja_file_wins(tmp_path: Path) -> None:
    directory = save(byte_level(), tmp_path, chat_template="config")
    (directory / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(directory).render(Chat(MESSAGES)) == "file"


def test_the_operators_file_wins_over_the_models(tmp_path: Path) -> None:
    directory = save(byte_level(), tmp_path, chat_template="config")
    file = tmp_path / "mine.jinja"
    file.write_text("é{{ bos_token }}", encoding="utf-8")
    assert ChatTemplate.load(directory, file).render(Chat(MESSAGES)) == "é<s>"


def test_an_unreadable_file_stops_the_start(tmp_path: Path) -> None:
    directory = save(byte_level(), tmp_path)
    file = tmp_path / "mine.jinja"
    with pytest.raises(ModelRefused, match="cannot be read"):
        ChatTemplate.load(directory, file)  # it is not there
    file.write_bytes(b"\xff")
    with pytest.raises(ModelRefused, match="cannot be read"):
        ChatTemplate.load(directory, file)  # it is no text


def test_a_model_without_a_template_loads_without_one(tmp_path: Path) -> None:
    assert not ChatTemplate.load(save(byte_level(), tmp_path)).present


def test_a_template_may_ask_for_the_date() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(Chat(MESSAGES))
    assert abs(date.fromisoformat(text) - date.today()) <= timedelta(days=1)  # noqa: DTZ011


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
    ],
)
def test_named_templates(tmp_path: Path, value: Any, expected: str) -> None:
    directory = save(byte_level(), tmp_path, chat_template=value)
    assert ChatTemplate.load(directory).render(Chat(MESSAGES)) == expected


@pytest.mark.parametrize("value", [[], ["x"], 3, [{"name": "a"}, {"name": "b"}], "{% if %}"])
def test_broken_templates_stop_the_start(tmp_path: Path, value: Any) -> None:
    directory = save(byte_level(), tmp_path, chat_template=value)
    with pytest.raises(ModelRefused):
        ChatTemplate.load(directory)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_a_400_about_messages(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(Chat(MESSAGES))
    assert caught.value.field == "messages"


def test_the_reason_of_raise_exception_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(Chat(MESSAGES))


def test_no_template_is_a_clear_400() -> None:
    template = ChatTemplate(None, {})
    assert not template.present
    with pytest.raises(InvalidRequest, match="no chat template"):
        template.render(Chat(MESSAGES))


def test_own_names_cannot_be_overridden() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("x", {}).render(Chat(MESSAGES, kwargs={"documents": [1]}))
    assert caught.value.field == "chat_template_kwargs"


def test_output_is_bounded() -> None:
    source = "{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="too long"):
        ChatTemplate(source, {}).render(Chat([{"role": "user", "content": "x" * 20_000}]))
