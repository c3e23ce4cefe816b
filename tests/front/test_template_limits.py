"""Hostile chat templates, and hostile data for good ones: each fails alone, in time, and without
the memory; nothing that is rendered in this process can be large."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.protocol.errors import InvalidRequest, ModelRefused, Unavailable
from baton.runtime.children import ChildBudget
from baton.text.chat_template import Chat, ChatTemplate
from baton.text.rendering import TemplateRenderer
from baton.text.template_limits import MAX_WRITTEN, OverBudget
from router.prompts.reader import AT_ONCE_S, ChatInputs, Length, PromptReader
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


MACRO = "{% macro f(x, n) %}{% if n %}"
ENDS_MACRO = "{% else %}{{ x }}{% endif %}{% endmacro %}"
NESTS = "{% set ns = namespace(l=['a'], m=['a']) %}{% for i in range(40) %}"
# Lists that hold one list twice: small, and without an end for whoever spells them.
SHARED = [
    NESTS + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    NESTS + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l | string | length }}",
    NESTS + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}",
    NESTS + "{% set ns.l = [[[ns.l, ns.l]]][0][0] %}{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = {'a': [ns.l, ns.l]}.get('a') %}{% endfor %}{{ ns.l }}",
    NESTS + "{% for k, v in {'a': [ns.l, ns.l]}.items() %}{% set ns.l = v %}{% endfor %}"
    "{% endfor %}{{ ns.l }}",
    NESTS + "{% for k, v in {'a': [ns.l, ns.l]} | dictsort %}{% set ns.l = v %}{% endfor %}"
    "{% endfor %}{{ ns.l }}",
    NESTS + "{% for x in [[ns.l, ns.l], 1] %}{% if loop.last %}{% set ns.l = loop.previtem %}"
    "{% endif %}{% endfor %}{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = [1, 2] | map(attribute='x', default=ns.l) | list %}{% endfor %}"
    "{{ ns.l }}",
    NESTS + "{% set ns.l = ns.l | default([ns.l, ns.l]) %}{% set ns.l = none or [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = namespace(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = [ns.l] * 2 %}{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = [ns.l, ns.l] | batch(2) | list %}{% endfor %}{{ ns.l }}",
    NESTS + "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"
    "{{ ns.l == ns.m }}",
    MACRO + "{{ f([x, x], n - 1) }}" + ENDS_MACRO + "{{ f('a', 40) }}",
    MACRO + "{{ f(n=n - 1, x=[x, x]) }}" + ENDS_MACRO + "{{ f('a', 40) }}",
    "{% set x %}{% endset %}" + "{% set x = [x, x] %}" * 40 + "{{ x | tojson }}",
    "{% with x = [1] %}{% with y = [x, x] %}{{ y }}{% endwith %}{% endwith %}"
    + NESTS + "{% with y = [ns.l, ns.l] %}{% set ns.l = y %}{% endwith %}{% endfor %}{{ ns.l }}",
]  # fmt: skip
WIDE = ["{{ '%*d' % (10 ** 9, 5) }}", "{{ messages[0].content % 1 }}", "{{ '%1000000000d' % 1 }}"]
HUGE = "{% set ns = namespace(l=messages) %}{% for i in range(9) %}{% set ns.l = ns.l + ns.l %}"
BOMBS = [*SLOW, *LARGE, *SHARED, *WIDE]
QUICK = ChildBudget(cpu_s=0.2, memory_bytes=160 << 20, wall_s=60.0)


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(QUICK)
    yield made
    made.close()
    made.close()


def at_once(source: str, *messages: dict[str, Any]) -> str | None:
    """What this process makes of it, if it may: within its time and memory, whatever it is."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    try:
        template = ChatTemplate(source, {})
        if not template.harmless:
            return None
        text = template.render_at_once(AT_ONCE_S, Chat(messages or MESSAGES))
    except (OverBudget, InvalidRequest, ModelRefused):
        text = None
    assert time.thread_time() - began < 2.0, source
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10, source
    assert text is None or len(text) <= 2 * MAX_WRITTEN
    return text


@pytest.mark.parametrize("source", [*SLOW, *LARGE])
def test_a_bomb_is_not_for_this_process(source: str) -> None:
    assert at_once(source) is None


@pytest.mark.parametrize("source", SHARED)
def test_what_nests_itself_is_not_harmless(source: str) -> None:
    assert not ChatTemplate(source, {}).harmless


@pytest.mark.parametrize(
    "source", [*SHARED[:3], SHARED[15], *WIDE[::2], SLOW[0], SLOW[3], LARGE[0]]
)
def test_a_bomb_is_given_up_alone(renderer: TemplateRenderer, source: str) -> None:
    template, before = ChatTemplate(source, {}), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="the chat template") as caught:
        renderer.render(template, Chat(MESSAGES))
    assert caught.value.field == "messages"
    assert renderer.render(ChatTemplate("{{ messages[0].content }}", {}), Chat(MESSAGES)) == "hello"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_hostile_data_harms_no_good_template(renderer: TemplateRenderer) -> None:
    """Quadratic in the messages, and each is spelled: 8 MB of them are given up."""
    pairs = "{% for m in messages %}{% for n in messages %}{{ m | tojson }}{% endfor %}{% endfor %}"
    template = ChatTemplate(pairs, {})
    assert template.harmless
    many = [{"role": "user", "content": "é" * 400}] * 10_000
    with pytest.raises(InvalidRequest, match=r"too much|too long"):
        renderer.render(template, Chat(many))
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    assert renderer.render(ChatTemplate("{{ x }}", {}), Chat(MESSAGES, kwargs={"x": deep}))
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        renderer.render(template, Chat(MESSAGES, kwargs={"x": deep}))


def test_a_child_tells_what_the_template_tells(renderer: TemplateRenderer) -> None:
    chat = Chat(
        [{"role": "user", "content": "é\u2028"}], [{"type": "x"}], kwargs={"own": {"a": 1.0}}
    )
    source = "{{ bos }}{{ messages[0].content }}{{ tools | tojson }}{{ own }}"
    template = ChatTemplate(source, {"bos": "<s>"})
    assert renderer.render(template, chat) == template.render(chat)
    for broken, field in (
        ("{{ raise_exception('not so') }}", "messages"), ("{{ messages.x.y }}", "messages"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as expected:
            ChatTemplate(broken, {}).render(chat)
        with pytest.raises(InvalidRequest) as caught:
            renderer.render(ChatTemplate(broken, {}), chat)
        assert (caught.value.message, caught.value.field) == (expected.value.message, field)


def test_a_foreign_source_is_blamed_by_its_own_name(renderer: TemplateRenderer) -> None:
    """The seam for a request's own `chat_template`: it is not even compiled in this process."""
    chat = Chat(MESSAGES)
    assert renderer.render_by("{{ bos }}{{ messages[0].content }}", {"bos": "B"}, chat) == "Bhello"
    for source in ("{% if %}", "{" * 100_000, "{{ " + "[" * 5000, "x" * (2 << 20)):
        with pytest.raises(InvalidRequest) as caught:
            renderer.render_by(source, {}, chat)
        assert caught.value.field in ("chat_template", "messages")


def test_a_busy_machine_is_no_fault_of_the_client() -> None:
    renderer = TemplateRenderer(ChildBudget(cpu_s=60.0, wall_s=0.2))
    with pytest.raises(Unavailable) as caught:
        renderer.render(ChatTemplate(LOOPS, {}), Chat(MESSAGES))
    assert caught.value.retry_after_s
    renderer.close()


def test_what_templates_do_is_harmless_and_within_the_limits() -> None:
    source = (
        "{% macro line(m, index) %}{{ '%-10s|' ~ m.role }}{{ '{}'.format(index) }}"
        "{{ m.content | trim | indent(2) | replace('a', 'bb') }}{% endmacro %}"
        "{% set ns = namespace(n=0, text='', calls=[]) %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.calls = ns.calls + [m] %}"
        "{% set ns.text = ns.text ~ m.role + ', ' %}{{ line(m, loop.index) }}{{ loop.last }}"
        "{% set kept %}[{{ m.content | upper }}]{% endset %}"
        "{{ kept }}{% endfor %}{{ ns.text.rstrip(', ').split(', ') | join('+') }}{{ '-' * 3 }}"
        "{{ messages | map(attribute='role') | list | length }}{{ ns.n % 2 }}"
        "{{ {'a': messages[1:], 'b': ns.n} | tojson }}{% if tools is defined and tools %}x"
        "{% endif %}"
        "{%- for m in ns.calls[::-1] if m.role in ['user'] %}{{ m['content'] }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.harmless
    chat = Chat([*MESSAGES, {"role": "tool", "content": "a\nb"}])
    text = template.render_at_once(5.0, chat)
    assert text == template.render(chat)
    assert text.endswith('---20{"a": [{"role": "tool", "content": "a\\nb"}], "b": 2}hello')


def test_a_long_history_renders_in_time(renderer: TemplateRenderer) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    many = [{"role": "user", "content": "word " * 200}] * 5000
    assert len(renderer.render(ChatTemplate(source, {}), Chat(many))) > 4_000_000


def test_the_budget_is_of_one_rendering() -> None:
    template = ChatTemplate("{% for a in range(20000) %}{{ 'x' }}{% endfor %}", {})
    for _ in range(20):
        assert len(template.render_at_once(5.0, Chat(MESSAGES))) == 20_000
    with pytest.raises(OverBudget):
        template.render_at_once(0.0, Chat(MESSAGES))


# ---- templates that nobody wrote ----

LEAVES = st.sampled_from([
    "ns.a", "ns.b", "x", "y", "messages", "messages[0]", "messages[0].content", "loop.index", "1",
    "'ab'", "m", "true", "none", "[]", "{}", "range(60)",
])  # fmt: skip
FILTERS = st.sampled_from([
    "tojson", "string", "list", "join('ab')", "length", "first", "last", "items", "dictsort",
    "map('string')", "map(attribute='content')", "map(attribute='q', default=ns.a)", "upper",
    "unique", "reverse", "replace('a', 'aaaaaaaa')", "replace(ns.a, ns.b)", "join(ns.a)", "sort",
    "default(x)", "indent(9)", "selectattr('role')", "batch(2)", "escape", "max", "trim", "safe",
    "pprint",
])  # fmt: skip
METHODS = st.sampled_from([
    "split('a')", "items()", "get('a', ns.a)", "values()", "replace('a', 'aaaaaaaa')", "join(ns.b)",
    "upper()", "strip()", "format(ns.a)", "partition('a')", "splitlines()",
])  # fmt: skip


def _expressions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    one, two = st.tuples(inner), st.tuples(inner, inner)
    return st.one_of(
        two.map(lambda it: f"[{it[0]}, {it[1]}]"),
        two.map(lambda it: f"({it[0]}, {it[1]})"),
        two.map(lambda it: f"{{'a': {it[0]}, 'b': {it[1]}}}"),
        two.map(lambda it: f"({it[0]} ~ {it[1]})"),
        two.map(lambda it: f"({it[0]} + {it[1]})"),
        two.map(lambda it: f"({it[0]} if {it[1]} else {it[0]})"),
        two.map(lambda it: f"({it[0]} == {it[1]})"),
        two.map(lambda it: f"({it[0]} or {it[1]})"),
        two.map(lambda it: f"({it[0]} in {it[1]})"),
        one.map(lambda it: f"{it[0]}[0]"),
        one.map(lambda it: f"{it[0]}[:9]"),
        one.map(lambda it: f"{it[0]}.a"),
        one.map(lambda it: f"({it[0]} * 99)"),
        st.tuples(inner, FILTERS).map(lambda it: f"({it[0]} | {it[1]})"),
        st.tuples(inner, METHODS).map(lambda it: f"{it[0]}.{it[1]}"),
        st.tuples(inner, inner).map(lambda it: f"f({it[0]}, y={it[1]})"),
    )


EXPRESSIONS = st.recursive(LEAVES, _expressions, max_leaves=5)


def _statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=4).map("".join)
    return st.one_of(
        st.tuples(EXPRESSIONS, body).map(
            lambda it: f"{{% for x in {it[0]} %}}{it[1]}{{% endfor %}}"
        ),
        body.map(lambda it: f"{{% for i in range(60) %}}{it}{{% endfor %}}"),
        st.tuples(EXPRESSIONS, body).map(
            lambda it: f"{{% for x, y in {it[0]} %}}{it[1]}{{% endfor %}}"
        ),
        body.map(lambda it: f"{{% set x %}}{it}{{% endset %}}"),
        st.tuples(EXPRESSIONS, body).map(lambda it: f"{{% if {it[0]} %}}{it[1]}{{% endif %}}"),
    )


PLACES = st.sampled_from(["ns.a", "ns.b", "x", "y", "x, y"])
STATEMENTS = st.recursive(
    st.one_of(
        EXPRESSIONS.map(lambda it: f"{{{{ {it} }}}}"),
        st.tuples(PLACES, EXPRESSIONS).map(lambda it: f"{{% set {it[0]} = {it[1]} %}}"),
    ),
    _statements,
    max_leaves=8,
)
TEMPLATES = st.tuples(
    st.lists(STATEMENTS, min_size=1, max_size=2), st.lists(STATEMENTS, min_size=1, max_size=4)
).map(
    lambda it: "{% set ns = namespace(a='a', b=[]) %}{% macro f(x, y='b') %}"
    + "".join(it[0]) + "{% endmacro %}" + "".join(it[1])
)  # fmt: skip
GENERATED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(GENERATED, max_examples=60)
@given(TEMPLATES)
def test_no_template_hangs_or_fills_this_process(source: str) -> None:
    text = at_once(source, {"role": "user", "content": "aa'a%99999d{0:>9999}" * 40})
    if text is not None:
        chat = Chat([{"role": "user", "content": "aa'a%99999d{0:>9999}" * 40}])
        assert text == ChatTemplate(source, {}).render(chat)


# ---- on a router ----


async def test_a_bomb_does_not_stop_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small conversations are rendered on the event loop: once, briefly, then in a child."""
    monkeypatch.setattr("baton.text.rendering.BUDGET", QUICK)
    template = ChatTemplate(LOOPS, {})
    assert template.harmless
    reader = PromptReader(TOKENIZER, template)
    asked = ChatInputs(Chat(MESSAGES), Length(1000))
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


@pytest.mark.parametrize("source", [LOOPS, SHARED[0]])
async def test_clients_of_such_a_model_are_told(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr("baton.text.rendering.BUDGET", QUICK)
    front = Front(chat_template=ChatTemplate(source, {}))
    async with front.client() as client:
        body: dict[str, Any] = {"messages": MESSAGES}
        replies = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=body) for _ in range(4)),
            client.post("/v1/completions", json={"prompt": "hello"}),
        )
    assert [reply.status_code for reply in replies] == [400] * 4 + [200]
    assert replies[0].json()["error"]["param"] == "messages"


async def test_no_client_may_raise_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.text.rendering.BUDGET", QUICK)
    front = Front(chat_template=ChatTemplate(LOOPS, {}))
    async with front.client() as client:
        for name in ("seconds", "limit_s", "self", "messages", "deadline", "environment"):
            kwargs = {name: 10**6}
            body: dict[str, Any] = {"messages": MESSAGES, "chat_template_kwargs": kwargs}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 400
