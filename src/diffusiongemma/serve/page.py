"""`/docs`: the OpenAPI document as a plain page, made here, with no script and nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code { font-family: ui-monospace, monospace; font-size: 0.9em; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid #8884; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
summary { cursor: pointer; }
h2 { border-top: 2px solid #8884; padding-top: 1rem; }
""".lstrip()


def docs_page(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    parts = [f"<h1>{escape(document['info']['title'])}</h1>", f"<p>{escape(document['info']['description'])}</p>"]
    parts.append('<p>For machines: <a href="/openapi.json">/openapi.json</a>.</p>')
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('summary', ''))}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                parts.append(_table("Request", body, schemas))
            answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
            if answer:
                parts.append(f"<details><summary>Response</summary>{_table('', answer, schemas)}</details>")
    parts.append("<h2>Parts</h2>")
    for name in sorted(schemas):
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3>{_table("", schemas[name], schemas)}')
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>API</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/docs.css">'
        f"<body>{''.join(parts)}</body></html>"
    )


def _table(caption: str, schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rsplit("/", 1)[-1]]
    needed = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in needed else ''}</td><td>{_kind(field)}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    ]
    title = f"<caption>{escape(caption)} (* needed)</caption>" if caption else ""
    said = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return f"{said}<table>{title}{''.join(rows)}</table>"


def _kind(field: dict[str, Any]) -> str:
    """A type in words, with a link where it is a part of its own."""
    if "$ref" in field:
        name = escape(field["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in field:
            return " or ".join(dict.fromkeys(map(_kind, field[several])))
    if "enum" in field or "const" in field:
        return " | ".join(f"<code>{escape(repr(value))}</code>" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return escape(str(field.get("type", "any")))
