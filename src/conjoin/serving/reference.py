"""The reference of the endpoint: its OpenAPI schema as a page that loads nothing else."""

import json
from collections.abc import Mapping
from typing import Any

from conjoin.serving.limits import Limits


def reference_page(schema: Mapping[str, Any], limits: Limits) -> str:
    """Render an OpenAPI schema.

    Args:
        schema: As FastAPI makes it.
        limits: What the endpoint accepts.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("conjoin.serving", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    operations = [
        {
            "method": method.upper(),
            "path": path,
            "summary": operation.get("description", ""),
            "request": _schema(schema, operation.get("requestBody", {}).get("content", {})),
            "response": _schema(schema, operation["responses"]["200"].get("content", {})),
        }
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    return environment.get_template("reference.html.j2").render(
        schema=schema, operations=operations, limits=vars(limits)
    )


def _schema(schema: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe the schema of a body: its purpose, its fields, and the schema itself as JSON."""
    body = content.get("application/json", {}).get("schema")
    if body is None:
        return None
    resolved = _resolve(schema, body)
    required = resolved.get("required", [])
    fields = [
        {"name": name, "type": _type(schema, field), "about": field.get("description", ""), "needed": name in required}
        for name, field in resolved.get("properties", {}).items()
    ]
    return {"about": resolved.get("description", ""), "fields": fields, "text": json.dumps(resolved, indent=2)}


def _resolve(schema: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    name = part.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else part


def _type(schema: Mapping[str, Any], field: Mapping[str, Any]) -> str:
    """A type in words."""
    if "$ref" in field:
        fields = _resolve(schema, field).get("properties", {})
        return "{" + ", ".join(fields) + "}"
    if "anyOf" in field:
        return " or ".join(_type(schema, part) for part in field["anyOf"])
    if field.get("type") == "array":
        return f"list of ({_type(schema, field['items'])})" if field.get("items") else "list"
    if field.get("type") == "object" and field.get("properties"):
        return "{" + ", ".join(field["properties"]) + "}"
    return str(field.get("type", "anything"))
