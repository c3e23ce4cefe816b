"""/docs: the document of /openapi.json as one HTML page. No script, nothing from elsewhere.

It shows the contents of the document only.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

import orjson

STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}code,pre{font:14px ui-monospace,monospace}pre{overflow:auto}"
    "td,th{text-align:left;vertical-align:top;padding:.1rem 1rem .1rem 0}h3{margin:2rem 0 .2rem}"
)
# The content-security policy allows nothing but the page's own inline style.
HEADERS: Final = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_OK: Final = "200"


def page(document: Mapping[str, Any]) -> str:
    """Return the HTML page that documents the API. Its links are relative, because the page may be
    served under a prefix of the URL's path."""
    info = document["info"]
    operations = [
        _operation(method, path, told)
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    ]
    types = [_type(name, schema) for name, schema in document["components"]["schemas"].items()]
    title = f"{info['title']} {info['version']}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{STYLE}</style><h1>{escape(title)}</h1><p>{escape(info['description'])}"
        " The same for programs: <a href=openapi.json>openapi.json</a>; what is served:"
        " <a href=v1/models>v1/models</a>.</p>"
        f"<h2>Endpoints</h2>{''.join(operations)}<h2>Types</h2>{''.join(types)}</html>"
    )


def _operation(method: str, path: str, told: Mapping[str, Any]) -> str:
    body = told.get("requestBody", {}).get("content", {}).get("application/json")
    parts = [f"<h3><code>{method.upper()} {escape(path)}</code></h3><p>{escape(told['summary'])}"]
    if body is not None:
        parts.append(f"<br>takes {_kind(body['schema'])}")
    answers = (_kind(each["schema"]) for each in told["responses"][_OK]["content"].values())
    known = " or ".join(kind for kind in answers if kind)
    parts.append(f"<br>answers {known}</p>")
    if body is not None and "example" in body:
        example = escape(orjson.dumps(body["example"]).decode())
        parts.append(f"<pre>{example}</pre>")
    return "".join(parts)


def _type(name: str, schema: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code><td>{_kind(told)}"
        f"<td>{'required' if field in needed else ''}"
        for field, told in schema.get("properties", {}).items()
    ]
    text = escape(str(schema.get("description", "")))
    return f"<h3 id={escape(name)}>{escape(name)}</h3><p>{text}</p><table>{''.join(rows)}</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe a schema in a few words of HTML. That it may be null is not mentioned."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_kind(each) for each in schema[key] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(orjson.dumps(each).decode())}</code>" for each in values)
    kind = schema.get("type", "")
    named = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if named == "array" and schema.get("items"):
        return f"array of {_kind(schema['items'])}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = f" from {low} to {high}" if None not in (low, high) else ""
    return escape(named + bounds)
