"""Decides which chat templates may be rendered in this process: those whose values all stay small.

Jinja's sandbox keeps a template from running code, but not from much work. `{% set ns.l = [ns.l,
ns.l] %}`, forty times, makes forty small lists. Printing the last one makes a text of 2^40 letters
in one call of native code, which nothing can stop. So a template is harmless only if it consists of
what is listed here. Nothing in the list can nest a value that the template itself has made:

    depth 0   a number, a string, a part of what the template was given (any tree, unchanged)
    depth 1   a list or dictionary of those: written out, or the result of a filter or method
    deeper    only written out within one expression; no name ever stands for such a value

Depths are found for every name and every attribute of a namespace, over all places that set it. So
a value has few levels, and the size of each level is limited when it is made
(baton/text/template_limits.py: lengths of strings and lists, turns of loops, written text, time). A
template that does anything else is not refused: it is rendered in a child
(baton/text/rendering.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, cast

from jinja2 import nodes

MAX_SOURCE_CHARS: Final = 64 << 10
MAX_NODES: Final = 4096
MAX_LEAVES: Final = 64  # values written in one list or dictionary
MAX_DEEP_LEAVES: Final = 4  # those of the values that may have a depth above 0
MAX_DEPTH: Final = 3
MAX_NUMBER: Final = 256  # the largest number that a filter or a product may be given
MAX_OPTION_CHARS: Final = 16
LOOP: Final = {
    **dict.fromkeys(
        ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"),
        0,
    ),
    **dict.fromkeys(("previtem", "nextitem"), MAX_DEPTH - 1),  # of the value that is walked through
}
# Filters and methods, by the kind of their result.
SCALAR_FILTERS: Final = frozenset({
    "abs", "capitalize", "count", "e", "escape", "float", "int", "length", "lower", "round",
    "safe", "string", "title", "tojson", "trim", "upper", "indent", "join", "replace",
})  # fmt: skip
LIST_FILTERS: Final = frozenset({
    "list", "reverse", "select", "reject", "selectattr", "rejectattr", "sort", "unique",
})  # fmt: skip
ELEMENT_FILTERS: Final = frozenset({
    "first", "last", "max", "min",
})  # fmt: skip
PAIR_FILTERS: Final = frozenset({"dictsort", "items"})
SCALAR_METHODS: Final = frozenset({
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit",
    "islower", "isspace", "isupper", "join", "lower", "lstrip", "removeprefix", "removesuffix",
    "replace", "rfind", "rstrip", "startswith", "strip", "title", "upper",
})  # fmt: skip
LIST_METHODS: Final = frozenset({
    "keys", "partition", "rpartition", "rsplit", "split", "splitlines", "values",
})  # fmt: skip
# Named tests, each of which looks at its values once.
TESTS: Final = frozenset({
    "boolean", "callable", "defined", "divisibleby", "eq", "equalto", "even", "false", "float",
    "ge", "gt", "greaterthan", "in", "integer", "iterable", "le", "lessthan", "lower", "lt",
    "mapping", "ne", "none", "number", "odd", "sameas", "sequence", "string", "true",
    "undefined", "upper", "==", "!=", "<", "<=", ">", ">=",
})  # fmt: skip
_PLAIN_FORMAT: Final = re.compile(r"([^{}]|\{[A-Za-z0-9_]{0,32}\})*")
_STATEMENTS: Final = (
    nodes.Template, nodes.Output, nodes.If, nodes.Break, nodes.Continue,
)  # fmt: skip
_SCALAR_OPERATIONS: Final = (
    nodes.Sub, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos, nodes.Not, nodes.Compare,
    nodes.Operand, nodes.Concat, nodes.TemplateData,
)  # fmt: skip
_DISPLAYS: Final = (nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)


def is_harmless(source: str, tree: nodes.Template) -> bool:
    """Whether the template may be rendered in this process, within BoundedEnvironment's limits."""
    if len(source) > MAX_SOURCE_CHARS or sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
        return False
    try:
        judge = _Judge(tree)
        while judge.learns():
            pass
    except _Unknown:
        return False
    return True


class _Unknown(Exception):
    """The template does something that is not listed here."""


class _Judge:
    """Finds the depths of all names of one template, over all places that set them."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._depths: dict[str, int] = {}  # of names; a namespace's attribute is ".attribute"
        self._macros: dict[str, list[nodes.Macro]] = {}
        for macro in tree.find_all(nodes.Macro):
            self._macros.setdefault(macro.name, []).append(macro)
        self._namespaces = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_namespace(assign.node)
        }

    def learns(self) -> bool:
        """Walk through the template once, and note how deep each name's values are nested.

        Return whether any of these depths has grown; if so, call again. Raises _Unknown if the
        template does something that this module does not list.
        """
        before = dict(self._depths)
        self._statement(self._tree)
        return self._depths != before

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Assign() | nodes.AssignBlock() | nodes.With() | nodes.Macro():
                self._binding(node)
            case nodes.For(recursive=False):
                self._assign(node.target, _element(self._of(node.iter)))
                self._all([*([node.test] if node.test else []), *node.body, *node.else_])
            case nodes.Expr():
                self._of(node)
            case _ if isinstance(node, _STATEMENTS):
                self._all(node.iter_child_nodes())
            case _:
                raise _Unknown

    def _binding(self, node: nodes.Assign | nodes.AssignBlock | nodes.With | nodes.Macro) -> None:
        match node:
            case nodes.Assign(target=nodes.Name(), node=nodes.Call() as made) if _is_namespace(
                made
            ):
                for keyword in made.kwargs:
                    self._set(f".{keyword.key}", self._of(keyword.value))
                return
            case nodes.Assign():
                self._assign(node.target, self._of(node.node))
                return
            case nodes.AssignBlock():
                if node.filter is not None and node.filter.name not in SCALAR_FILTERS:
                    raise _Unknown
                self._assign(node.target, 0)
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=True):
                    self._assign(target, self._of(value))
            case nodes.Macro():
                for name, value in zip(reversed(node.args), reversed(node.defaults), strict=False):
                    self._assign(name, self._of(value))
        self._all(node.body)

    def _all(self, found: Iterable[nodes.Node]) -> None:
        for node in found:
            self._statement(node)

    # ---- what is set ----

    def _assign(self, target: nodes.Node, depth: int) -> None:
        match target:
            case nodes.Name(name=name):
                if name in self._macros or name in self._namespaces or name in _OURS:
                    raise _Unknown
                self._set(name, depth)
            case nodes.NSRef(attr=attr):
                self._set(f".{attr}", depth)
            case nodes.Tuple(items=items):
                for item in items:
                    self._assign(item, _element(depth))
            case _:
                raise _Unknown

    def _set(self, name: str, depth: int) -> None:
        if depth > 1:
            raise _Unknown
        self._depths[name] = max(depth, self._depths.get(name, 0))

    # ---- what is read ----

    def _of(self, node: nodes.Node) -> int:
        """Return the depth of an expression. Raises _Unknown."""
        match node:
            case nodes.Const():
                depth = 0
            case nodes.Name() | nodes.Getattr() | nodes.Getitem():
                depth = self._part(node)
            case nodes.Filter() | nodes.Test() | nodes.Call():
                depth = self._applied(node)
            case nodes.List() | nodes.Tuple() | nodes.Dict():
                depth = self._display(node)
            case nodes.CondExpr() | nodes.And() | nodes.Or():
                depth = self._max(node.iter_child_nodes())
            case nodes.Add() | nodes.Mul():
                depth = self._max(node.iter_child_nodes())
                if isinstance(node, nodes.Mul) and (depth or not _has_small_factor(node)):
                    raise _Unknown
                if _is_text(node.left) or _is_text(node.right):
                    depth = 0
            case _ if isinstance(node, _SCALAR_OPERATIONS):
                self._max(node.iter_child_nodes())
                depth = 0
            case _:
                raise _Unknown
        if depth > MAX_DEPTH:
            raise _Unknown
        return depth

    def _part(self, node: nodes.Name | nodes.Getattr | nodes.Getitem) -> int:
        match node:
            case nodes.Name(name=name):
                if name in self._macros or name in self._namespaces or name in _OURS:
                    raise _Unknown
                return self._depths.get(name, 0)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                if attr not in LOOP:
                    raise _Unknown
                return LOOP[attr]
            case nodes.Getattr(node=nodes.Name(name=name)) if name in self._namespaces:
                return self._depths.get(f".{node.attr}", 0)
            case nodes.Getattr(node=value):
                return _element(self._of(value))
            case nodes.Getitem(node=value, arg=nodes.Slice() as arg):
                self._max(arg.iter_child_nodes())
                return self._of(value)
            case nodes.Getitem(node=value, arg=arg):
                self._of(arg)
                return _element(self._of(value))

    def _max(self, found: Iterable[nodes.Node]) -> int:
        return max((self._of(node) for node in found), default=0)

    def _display(self, node: nodes.Expr) -> int:
        leaves = list(_leaves(node))
        depths = [self._of(leaf) for _, leaf in leaves]
        if len(leaves) > MAX_LEAVES or sum(depth > 0 for depth in depths) > MAX_DEEP_LEAVES:
            raise _Unknown
        levels = (level + depth for (level, _), depth in zip(leaves, depths, strict=True))
        return max(levels, default=1)

    def _applied(self, node: nodes.Filter | nodes.Test | nodes.Call) -> int:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _Unknown
        given = [*node.args, *(_value(keyword) for keyword in node.kwargs)]
        match node:
            case nodes.Test(node=nodes.Name(), name="defined" | "undefined"):
                return 0
            case nodes.Test():
                self._max([node.node, *given])
                if node.name not in TESTS:
                    raise _Unknown
                return 0
            case nodes.Filter(node=nodes.Expr() as value):
                return self._filter(node, self._of(value), given)
            case nodes.Call(node=nodes.Getattr(node=value, attr=name)):
                return self._method(name, value, given)
            case nodes.Call(node=nodes.Name(name=name)):
                return self._function(name, node, given)
            case _:
                raise _Unknown

    def _filter(self, node: nodes.Filter, depth: int, given: list[nodes.Expr]) -> int:
        name = node.name
        others = self._max(given)
        if name in ("default", "d"):
            return max(depth, others)
        if name in SCALAR_FILTERS:
            if name not in ("join", "replace") and not all(map(_is_option, given)):
                raise _Unknown
            return 0
        if name == "map":
            first = node.args[0] if node.args else None
            if first is not None and _constant(first) not in SCALAR_FILTERS:
                raise _Unknown
            if not all(map(_is_option, node.args[1:])):
                raise _Unknown
            return max(depth, others + 1)
        if name in LIST_FILTERS:
            if name in ("select", "reject") and not _names_a_test(node.args[:1]):
                raise _Unknown
            if name in ("selectattr", "rejectattr") and not _names_a_test(node.args[1:2]):
                raise _Unknown
            return max(depth, 1)
        if name in ELEMENT_FILTERS:
            return _element(depth)
        if name in PAIR_FILTERS:
            return depth + 1
        raise _Unknown

    def _method(self, name: str, value: nodes.Expr, given: list[nodes.Expr]) -> int:
        if name == "format":
            pattern = _constant(value)
            if not isinstance(pattern, str) or not _PLAIN_FORMAT.fullmatch(pattern):
                raise _Unknown
            self._max(given)
            return 0
        depth, others = self._of(value), self._max(given)
        if name in SCALAR_METHODS:
            return 0
        if name in LIST_METHODS:
            return max(depth, 1)
        if name == "items":
            return depth + 1
        if name == "get":
            return max(_element(depth), others)
        raise _Unknown

    def _function(self, name: str, node: nodes.Call, given: list[nodes.Expr]) -> int:
        depths = [self._of(value) for value in given]  # only once: calls may stand within calls
        if name in self._macros:
            for macro in self._macros[name]:
                for parameter, depth in zip(macro.args, depths, strict=False):
                    self._assign(parameter, depth)
            for keyword, depth in zip(node.kwargs, depths[len(node.args) :], strict=True):
                self._set(keyword.key, depth)
            return 0  # a text
        if name == "raise_exception":
            return 0
        if name == "strftime_now":
            if not all(isinstance(_constant(value), str) for value in given):
                raise _Unknown
            return 0
        if name == "range":
            return 1
        raise _Unknown


# Names that have a meaning for Jinja or this module. They are allowed only where the code above
# lists them.
_OURS: Final = frozenset({
    "caller", "cycler", "dict", "joiner", "kwargs", "lipsum", "loop", "namespace",
    "raise_exception", "range", "self", "strftime_now", "super", "varargs",
})  # fmt: skip


def _element(depth: int) -> int:
    return max(depth - 1, 0)


def _is_namespace(node: nodes.Node) -> bool:
    if not isinstance(node, nodes.Call) or not isinstance(node.node, nodes.Name):
        return False
    plain = not node.args and node.dyn_args is None and node.dyn_kwargs is None
    return plain and node.node.name == "namespace"


def _value(keyword: nodes.Node) -> nodes.Expr:
    return cast("nodes.Keyword | nodes.Pair", keyword).value


def _leaves(node: nodes.Node, level: int = 0) -> Iterable[tuple[int, nodes.Node]]:
    """Yield the values written in a list or dictionary, each with its nesting level."""
    if not isinstance(node, _DISPLAYS):
        yield level, node
        return
    level += not isinstance(node, nodes.Pair)
    for child in node.iter_child_nodes():
        yield from _leaves(child, level)


def _constant(node: nodes.Node) -> Any:
    return node.value if isinstance(node, nodes.Const) else None


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Concat) or isinstance(_constant(node), str)


def _has_small_factor(node: nodes.Mul) -> bool:
    return _is_small(node.left) or _is_small(node.right)


def _is_small(node: nodes.Node) -> bool:
    value = _constant(node)
    return isinstance(value, int) and abs(value) <= MAX_NUMBER


def _is_option(node: nodes.Node) -> bool:
    """Whether the node is a constant that cannot make a text much longer."""
    if isinstance(node, nodes.Tuple):
        return all(map(_is_option, node.items))
    if not isinstance(node, nodes.Const):
        return False
    value = node.value
    if isinstance(value, str):
        return len(value) <= MAX_OPTION_CHARS
    return value is None or isinstance(value, float) or _is_small(node)


def _names_a_test(given: list[nodes.Expr]) -> bool:
    return all(_constant(name) in TESTS for name in given)
