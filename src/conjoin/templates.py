"""The HTML templates of this package."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def template(name: str, **filters: Callable[..., str]) -> "Template":
    """Return a template, which escapes every value and refuses one that is missing.

    Args:
        name: Its path in the package, such as `evaluation/report.html.j2`.
        filters: Functions that it applies to values.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("conjoin", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= filters
    return environment.get_template(name)
