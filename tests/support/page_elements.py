"""What a page of HTML is made of, for tests of the report."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["Elements"]


class Elements(HTMLParser):
    """Every element of a page, with its attributes, and the text outside of styles and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        del tag
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("style", "script"):
            self.text += f" {data}"
