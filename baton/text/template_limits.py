"""Limits for a harmless chat template that is rendered in this process, over little data.

A harmless template (baton/text/template_rules.py) nests no value that it has made itself. So all
its values stay small if each string and each list stays small. Sizes are checked when values are
made:

    loop and macro bodies   tick() at each turn checks the time, and the literal text in the body
    what is written         finalize counts all characters, those inside `set` blocks included
    calls, filters, + * ~   the result must be no large text and no long list

A template that exceeds a limit raises OverBudget. That is not an error: a child, which has more
room, then renders it (baton/text/rendering.py). Time is the CPU time of the rendering thread,
because other threads may be busy. That clock is slow to read, so it is read only after as much wall
time has passed. The sandbox itself is Jinja's.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS: Final = 128 << 10  # of a string
MAX_WRITTEN: Final = 512 << 10  # characters written in all, those in `set` blocks included
MAX_ITEMS: Final = 4096  # of a list with different items
MAX_SUM: Final = 64  # items of a sum or a multiple of lists
MAX_BITS: Final = 256  # of a number
TICKS_PER_LOOK: Final = 16  # turns between two looks at the clock
_TICK: Final = "baton_tick"
_SIZED: Final = "baton_sized"
_CAPTURING: Final = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)


class OverBudget(Exception):
    """A template worked for too long, or made something too large, for this process."""


class _Meter(threading.local):
    """What the template that renders on this thread may still spend.

    `due`: the wall time from which CPU time is checked; None = no limit. `deadline`: a time of the
    thread's CPU clock; None before `due`.
    """

    seconds: float = 0.0
    due: float | None = None
    deadline: float | None = None
    ticks: int = 0
    written: int = 0


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Inheritance is Jinja's way to set them.

    `bounded` prepares a template. `start` must be called before each rendering, on its thread. Any
    thread may use it.
    """

    intercepted_binops = frozenset({"+", "*", "%"})

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any) -> None:
        """Add `filters` to those of Jinja, and put limits around all of them."""
        super().__init__(finalize=self._written, **options)
        self._meter = _Meter()
        self.filters.update(filters)
        for name, function in self.filters.items():
            self.filters[name] = self._bounded_filter(name, function)
        self.filters.update({_TICK: _ticking(self), _SIZED: self._sized})

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Change `tree` and return it: its loops and macros tick, and its sizes are checked."""
        # Literal text inside blocks is counted only here. Other text is counted when it is written.
        aside = {
            id(loop)
            for block in tree.find_all(_CAPTURING)
            for loop in (block, *block.find_all(nodes.For))
        }
        for node in tree.find_all((nodes.For, nodes.Macro)):
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
        """Begin a rendering of at most `seconds` on this thread."""
        meter = self._meter
        meter.seconds, meter.due, meter.deadline = seconds, time.monotonic() + seconds, None
        meter.ticks = meter.written = 0

    # ---- what templates run into ----

    def tick(self, literal_chars: int) -> None:
        """Count one more turn of a loop, or one call of a macro. Raises OverBudget."""
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
        """Count a value on its way into the text (Jinja's `finalize`); return it as a string."""
        text = value if isinstance(value, str) else str(value)
        self._count(len(text))
        return text

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str):
            _fits(len(value), MAX_CHARS)
        elif isinstance(value, list | tuple):
            _fits(len(cast("Sequence[Any]", value)), MAX_ITEMS)
        return value

    def _spend(self, name: str, value: Any, args: Sequence[Any]) -> Any:
        """Check the cost of calling `name` on `value`, and return `value`.

        An iterator that is to be joined is returned as a list.
        """
        self._look()
        if name == "join":
            value = list(value)
            _fits(len(value), MAX_ITEMS)
            _fits(sum(len(item) for item in value if isinstance(item, str)), MAX_CHARS)
            _fits(len(value) * len(str(args[0])) if args else 0, MAX_CHARS)
        elif name == "replace" and isinstance(value, str) and len(args) >= 2:
            _fits(value.count(str(args[0])) * len(str(args[1])), MAX_CHARS)
        return value

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some filters of Jinja get context, evaluation context or environment before the value.
        place = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value = self._spend(name, args[place], args[place + 1 :])
            return self._sized(function(*args[:place], value, *args[place + 1 :], **kwargs))

        return bounded

    def call(
        __self,  # Jinja's names, which a template's own keyword arguments must not equal
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        receiver = getattr(__obj, "__self__", None)  # the object of a bound method
        name = str(getattr(__obj, "__name__", "")) if isinstance(receiver, str) else ""
        if name == "join" and args:
            args = (__self._spend(name, args[0], [receiver]), *args[1:])
        else:
            __self._spend(name, receiver, args)
        return __self._sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._look()
        if operator == "+" and type(left) is str and type(right) is str:  # nearly all there are
            _fits(len(left) + len(right), MAX_CHARS)
            return left + right
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _ticking(environment: BoundedEnvironment) -> Callable[..., None]:
    """Return the filter that is put first into the bodies of loops and macros."""

    @pass_context  # with a context Jinja cannot evaluate the filter at compile time
    def tick(_: Context, value: None, literal_chars: int) -> None:
        environment.tick(literal_chars)

    return tick


class _SizeConcats(NodeTransformer):
    """Puts a filter around `a ~ b`, which is no operator to the sandbox."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, _SIZED, [], [], None, None)


def _texts(node: nodes.Node) -> list[nodes.TemplateData]:
    own = [node] if isinstance(node, nodes.TemplateData) else []
    return [*own, *node.find_all(nodes.TemplateData)]


def _fits(size: int, most: int) -> None:
    if size > most:
        raise OverBudget("it makes something that is too large")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    """Raise OverBudget for an operation whose result may be too large."""
    if operator == "%" and isinstance(left, str):
        raise OverBudget("it formats by a pattern")  # a pattern may pad to any width
    for one, other in ((left, right), (right, left)):
        if operator == "+" and isinstance(one, list | tuple):
            sizes = (len(part) for part in (left, right) if isinstance(part, list | tuple))
            _fits(sum(sizes), MAX_SUM)
        if operator == "*" and isinstance(one, str | list | tuple) and isinstance(other, int):
            most = MAX_CHARS if isinstance(one, str) else MAX_SUM
            _fits(len(cast("Sequence[Any]", one)) * max(0, other), most)
    if isinstance(left, int) and isinstance(right, int):
        _fits(left.bit_length() + right.bit_length(), MAX_BITS)
