"""Limits around a chat template: its time, and the size of everything that it makes.

Jinja's sandbox keeps a template from code, not from work: loops within loops, macros that call each
other, strings that double. A BoundedEnvironment counts at every place where a template can repeat
itself, and looks at sizes before it makes something large:

    loop and macro bodies   tick() at each turn: the deadline, and the literal text in there
    what is written         finalize: all characters, those inside `set` blocks too
    calls, filters          no huge numbers as arguments (widths, counts), no huge strings as result
    + * ** % ~              refused before the result exists

Time is that of the thread that renders, for other threads may be busy; but the clock of threads is
slow to read, so it counts only from when the one on the wall says that time is up: at most twice as
much is spent. Not here: the sandbox itself (Jinja's), nor where templates come from
(baton/chat_template.py).
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS: Final = 16 << 20  # of a string; more than any context
MAX_WRITTEN: Final = 4 * MAX_CHARS  # in all, what is set aside in blocks included
MAX_ITEMS: Final = 1 << 20  # of a list
MAX_ARGUMENT: Final = 1 << 20  # a number that a template passes to anything
MAX_BITS: Final = 4096  # of a number
TICKS_PER_LOOK: Final = 64  # at the clock
_LONG_WIDTH: Final = re.compile(r"[0-9]{7}")
_TICK: Final = "baton_tick"
_SIZED: Final = "baton_sized"
_CAPTURING: Final = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)


class OverBudget(Exception):
    """A template worked for too long, or makes something too large."""


class _Meter(threading.local):
    """What the template that renders on this thread may still spend, from `due` (on the wall's
    clock, None: no limit) on by the thread's own clock: until `deadline`."""

    seconds: float = 0.0
    due: float | None = None
    deadline: float | None = None
    ticks: int = 0
    written: int = 0


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits; inheritance is Jinja's own way to set them.

    Templates are made by `bounded`; `start` before each rendering, on its thread. Safe in several
    threads.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._written, **options)
        self._meter = _Meter()
        self._bounded: dict[str, Callable[..., Any]] = {}
        del self.globals["lipsum"]  # text of any length
        self.bound_filters()
        ours: dict[str, Callable[..., Any]] = {_TICK: _ticking(self), _SIZED: self._sized}
        self._bounded.update(ours)
        self.filters.update(ours)

    # ---- for baton/chat_template.py ----

    def bound_filters(self) -> None:
        """Put limits around filters that have none: once more after others were added."""
        for name, function in list(self.filters.items()):
            if function is not self._bounded.get(name):
                self.filters[name] = self._bounded[name] = self._bounded_filter(name, function)

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Mutates and answers `tree`: with ticks in its loops and macros, and sizes looked at."""
        # What is set aside is told by nobody else; the rest is counted as it leaves the template.
        aside = {
            id(loop)
            for block in tree.find_all(_CAPTURING)
            for loop in (block, *block.find_all(nodes.For))
        }
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            body = cast("list[nodes.Node]", cast("Any", node).body)
            literal = sum(len(text.data) for part in body for text in _texts(part))
            weight = nodes.Const(literal if id(node) in aside else 0)
            tick = nodes.Filter(nodes.Const(None), _TICK, [weight], [], None, None)
            body.insert(0, nodes.ExprStmt(tick))
        for block in tree.find_all(nodes.AssignBlock):
            if block.filter is None:
                block.filter = nodes.Filter(None, _SIZED, [], [], None, None)
        tree = cast("nodes.Template", _SizeConcats().visit(tree))
        tree.set_environment(self)
        return tree

    def start(self, seconds: float) -> None:
        """This thread renders now, for so long."""
        meter = self._meter
        meter.seconds, meter.due, meter.deadline = seconds, time.monotonic() + seconds, None
        meter.ticks = meter.written = 0

    # ---- what templates run into ----

    def tick(self, literal_chars: int) -> None:
        """One more turn of a loop, or call of a macro. Raises OverBudget."""
        self._count(literal_chars)
        self._look()

    def _look(self) -> None:
        meter = self._meter
        meter.ticks += 1
        if meter.due is None or meter.ticks % TICKS_PER_LOOK or time.monotonic() < meter.due:
            return
        if meter.deadline is None:
            meter.deadline = time.thread_time() + meter.seconds
        elif time.thread_time() > meter.deadline:
            raise OverBudget("it takes too long")

    def _count(self, num_chars: int) -> None:
        self._meter.written += num_chars
        if self._meter.written > MAX_WRITTEN:
            raise OverBudget("it writes too much")

    def _written(self, value: Any) -> Any:
        """Jinja's `finalize`: every value on its way into the text."""
        text = value if isinstance(value, str) else str(value)
        self._count(len(text))
        return text

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > MAX_CHARS:
            raise OverBudget("it makes a string that is too long")
        if isinstance(value, list | tuple) and len(value) > MAX_ITEMS:
            raise OverBudget("it makes a list that is too long")
        return value

    def _spend(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Before a call of `name` on `value`; answers `value`, which may have been an iterator."""
        self._look()
        for given in (*args, *kwargs.values()):
            if isinstance(given, int) and abs(given) > MAX_ARGUMENT:
                raise OverBudget("it passes a number that is too large")
        if name == "format":
            _check_format(value)
        elif name == "replace" and isinstance(value, str) and len(args) >= 2:
            old, new = str(args[0]), str(args[1])
            self._fits(len(value) + value.count(old) * len(new))
        return value

    def _join(self, separator: Any, items: Any) -> list[Any]:
        """The items as a list, once the string that joins them is known to fit."""
        found = list(items)
        self._fits(sum(len(i) if isinstance(i, str) else 8 for i in found))
        self._fits(len(found) * len(str(separator)))
        return found

    def _fits(self, num_chars: int) -> None:
        if num_chars > MAX_CHARS:
            raise OverBudget("it makes a string that is too long")

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Filters marked by Jinja get context, evaluation context or environment before the value.
        place = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            before, value, rest = args[:place], args[place], args[place + 1 :]
            if name == "join" and "attribute" not in kwargs and len(rest) < 2:
                value = self._join(rest[0] if rest else kwargs.get("d", ""), value)
            value = self._spend(name, value, rest, kwargs)
            return self._sized(function(*before, value, *rest, **kwargs))

        return bounded

    def call(
        __self,  # Jinja's names: a template's own keyword arguments must not meet them
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        receiver = getattr(__obj, "__self__", None)  # of a bound method
        name = str(getattr(__obj, "__name__", ""))
        if isinstance(receiver, str):
            if name == "join" and args:
                args = (__self._join(receiver, args[0]), *args[1:])
            __self._spend(name, receiver, args, kwargs)
        else:
            __self._spend("", None, args, kwargs)
        return __self._sized(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._look()
        if operator == "+" and type(left) is str and type(right) is str:  # nearly all there are
            self._fits(len(left) + len(right))
            return left + right
        _check_binop(operator, left, right)
        return self._sized(super().call_binop(context, operator, left, right))


def _ticking(environment: BoundedEnvironment) -> Callable[..., None]:
    """The filter that stands first in bodies."""

    @pass_context  # with one Jinja cannot compute it at compile time
    def tick(_: Context, value: None, literal_chars: int) -> None:
        environment.tick(literal_chars)

    return tick


class _SizeConcats(NodeTransformer):
    """`a ~ b` is no operator to the sandbox: its result goes through a filter."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, _SIZED, [], [], None, None)


def _texts(node: nodes.Node) -> list[nodes.TemplateData]:
    own = [node] if isinstance(node, nodes.TemplateData) else []
    return [*own, *node.find_all(nodes.TemplateData)]


def _check_format(pattern: Any) -> None:
    if _LONG_WIDTH.search(str(pattern)):
        raise OverBudget("it formats to a width that is too large")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    """Raise OverBudget for an operation whose result would be too large."""
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator == "+" and isinstance(left, str | list | tuple):
        if isinstance(right, str | list | tuple):
            _check_size(left, len(left) + len(right))
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                _check_size(one, len(one) * max(0, other))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_size(kind: str | list[Any] | tuple[Any, ...], size: int) -> None:
    if size > (MAX_CHARS if isinstance(kind, str) else MAX_ITEMS):
        raise OverBudget("it makes a string or a list that is too long")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise OverBudget("it makes a number that is too large")
