"""Bombs in a chat template: it is given up in time and without the memory; others are served."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

import pytest

from baton import chat_template
from baton.chat_template import ChatTemplate
from baton.errors import InvalidRequest, ModelRefused
from baton.template_limits import OverBudget
from router.prompts import AT_ONCE_S, Conversation, PromptReader
from tests.front.fakes import TOKENIZER, Front

MESSAGES = [{"role": "user", "content": "hello"}]
TWICE = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"
LOOPS = TWICE + ENDS
SLOW = [
    LOOPS,
    "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}" + TWICE + "{% call f() %}{% endcall %}" + ENDS,
    "{% for x in [[[[]]]] * 900000 recursive %}{{ loop(x) }}{{ loop(x) }}{% endfor %}" * 20,
    "{% set ns = namespace(n=0) %}" + TWICE + "{% set ns.n = ns.n + 1 %}" + ENDS,
]
DOUBLE = "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(60) %}"
LARGE = [
    "{{ 'x' * 10 ** 12 }}",
    "{{ 10 ** 12 * 'x' }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ (10 ** 9) ** (10 ** 9) }}",
    "{{ 2 ** (2 ** 30) }}",
    "{{ 'x' | center(10 ** 11) }}",
    "{{ 'x'.ljust(99999999999) }}",
    "{{ 'x'.zfill(99999999999) }}",
    "{{ '%099999999999d' % 1 }}",
    "{{ '%*d' | format(99999999999, 1) }}",
    "{{ '%09999999d' | format(1) }}",
    "{{ [[0] * 1000000, [0] * 1000000] | sum(start=[]) | length }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 99999999999) }}",
    "{{ 'x' | indent(99999999999, true) }}",
    "{{ [1] | tojson(indent=99999999999) }}",
    "{{ lipsum(n=10000) }}",
    "{{ range(99999) | batch(99999999999, 'x') | list }}",
    DOUBLE + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    DOUBLE + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    DOUBLE + "{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
    DOUBLE + "{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
    DOUBLE + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    DOUBLE + "{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
    DOUBLE + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    DOUBLE + "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    DOUBLE + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    DOUBLE.replace("'xxxxxxxx'", "[0]") + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    DOUBLE.replace("'xxxxxxxx'", "9") + "{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{{ " + "d(" * 30 + "'xxxxxxxx'" + ")" * 30 + " }}",
    "{{ " + "d(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% set x %}{% for a in range(99999) %}" + "y" * 10_000 + "{% endfor %}{% endset %}",
    "{% set s = 'x' * 9000000 %}{% set x %}{{ s }}{{ s }}{{ s }}{{ s }}{% endset %}",
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.1)


@pytest.mark.parametrize("source", [*SLOW, *LARGE])
def test_a_bomb_is_given_up(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    try:
        template = ChatTemplate(source, {})
    except ModelRefused:  # seen when it was compiled: it stops the start
        return
    with pytest.raises(InvalidRequest) as caught:
        template.render(MESSAGES)
    assert caught.value.field == "messages"
    assert time.thread_time() - began < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_what_templates_do_is_within_the_limits() -> None:
    source = (
        "{% macro line(m, index) %}{{ '%-10s|' % m.role }}{{ '{:>4}'.format(index) }}"
        "{{ m.content | trim | indent(2) | replace('a', 'bb') }}{% endmacro %}"
        "{% set ns = namespace(n=0, text='') %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.text = ns.text ~ m.role + ', ' %}{{ line(m, loop.index) }}{{ loop.last }}"
        "{{ loop.cycle('odd', 'even') }}{% set kept %}[{{ m.content | upper }}]{% endset %}"
        "{{ kept }}{% endfor %}{{ ns.text.rstrip(', ').split(', ') | join('+') }}{{ ns.n * '-' }}"
        "{{ messages | map(attribute='role') | list | length }}{{ [1, 2] | sum }}"
        "{% call(x) wrap() %}{{ x }}{% endcall %}"
    )
    source = "{% macro wrap() %}<{{ caller('in') }}>{% endmacro %}" + source
    text = ChatTemplate(source, {}).render([*MESSAGES, {"role": "tool", "content": "a\nb"}])
    first = "user      |   1helloFalseodd[HELLO]"
    assert text == first + "tool      |   2bb\n  bTrueeven[A\nB]user+tool--23<in>"


def test_a_long_history_renders_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    many = [{"role": "user", "content": "word " * 200}] * 5000
    assert len(ChatTemplate(source, {}).render(many)) > 4_000_000


def test_the_budget_is_of_one_rendering() -> None:
    template = ChatTemplate("{% for a in range(20000) %}{{ 'x' }}{% endfor %}", {})
    for _ in range(20):
        assert len(template.render_within(5.0, MESSAGES)) == 20_000
    with pytest.raises(OverBudget):
        template.render_within(0.0, MESSAGES)


async def test_a_bomb_does_not_stop_the_router() -> None:
    """Short conversations are rendered on the event loop: once, briefly, then on threads."""
    reader = PromptReader(TOKENIZER, ChatTemplate(LOOPS, {}))
    asked = Conversation(MESSAGES)
    longest = 0.0
    done = asyncio.Event()

    async def tick() -> None:
        nonlocal longest
        while not done.is_set():
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    ticking = asyncio.create_task(tick())
    for _ in range(4):
        with pytest.raises(InvalidRequest, match="given up"):
            await reader.chat(asked)
    done.set()
    await ticking
    reader.close()
    assert longest < AT_ONCE_S + 0.1


async def test_clients_of_such_a_model_are_told() -> None:
    front = Front(chat_template=ChatTemplate(LOOPS, {}))
    async with front.client() as client:
        body: dict[str, Any] = {"messages": MESSAGES}
        replies = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=body) for _ in range(4)),
            client.post("/v1/completions", json={"prompt": "hello"}),
        )
    assert [reply.status_code for reply in replies] == [400] * 4 + [200]
    assert replies[0].json()["error"]["param"] == "messages"


async def test_no_client_may_raise_the_limit() -> None:
    front = Front(chat_template=ChatTemplate(LOOPS, {}))
    async with front.client() as client:
        for name in ("seconds", "limit_s", "self", "messages", "deadline", "environment"):
            kwargs = {name: 10**6}
            body: dict[str, Any] = {"messages": MESSAGES, "chat_template_kwargs": kwargs}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 400
