"""HTML whose every text is escaped: what is no `Markup` is text, wherever it is from. Numbers and times for people."""

from __future__ import annotations

import html
import json
from datetime import UTC, datetime
from typing import Any

from safepoint.manager.events import sized

__all__ = ["Markup", "duration", "join", "json_script", "moment", "size", "tag"]

_VOID = frozenset({"input", "link", "meta", "rect"})


class Markup(str):
    """HTML that is as it should be."""

    __slots__ = ()


def tag(element: str, /, *children: str | None, **attributes: Any) -> Markup:
    """Return an element.

    Args:
        element: its name.
        children: text, which is escaped, or markup; None is left out.
        attributes: `class_` is `class`, `aria_label` is `aria-label`; True stands alone, None and False are left out.
    """
    opened = "".join(_attribute(key, value) for key, value in attributes.items())
    if element in _VOID:
        return Markup(f"<{element}{opened}>" if element != "rect" else f"<{element}{opened}/>")
    return Markup(f"<{element}{opened}>{join(*children)}</{element}>")


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def join(*children: str | None) -> Markup:
    """Return children one after the other."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else html.escape(child, quote=False)
            for child in children
            if child is not None
        )
    )


def json_script(identity: str, value: Any) -> Markup:
    """Return data for a script, in which nothing can end the element."""
    text = json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{html.escape(identity)}">{text}</script>')


def size(num_bytes: int | None) -> str:
    """Return a size for people, "" where it is not known."""
    return "" if num_bytes is None else sized(num_bytes)


def duration(secs: float) -> str:
    """Return a duration for people."""
    if secs < 0.0995:  # noqa: PLR2004 - a tenth of a second
        return f"{1000 * secs:.3g} ms"
    if secs < 99.5:  # noqa: PLR2004 - what has two digits before the point
        return f"{secs:.3g} s"
    minutes, rest = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(when: float | None) -> Markup:
    """Return a time, "" where it is not known."""
    if when is None:
        return Markup("")
    then = datetime.fromtimestamp(when, UTC)
    return tag("time", then.strftime("%Y-%m-%d %H:%M:%S"), datetime=then.isoformat(timespec="seconds"))
