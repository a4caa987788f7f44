"""A standalone SVG made fit for a place inside an HTML page."""

from __future__ import annotations

import re
from html import escape

_PROLOGUE = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_STYLE = re.compile(r"<style\b.*?</style>", re.DOTALL)
_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^")]+)')
_SIZE = re.compile(r'\s(?:width|height)="[^"]*"')


def inline_svg(svg: str, prefix: str, description: str) -> str:
    """`svg` without prologue and page-wide style, its ids prefixed so that several fit one page.

    The size is left to the page (the viewBox stays); `description` is what a screen reader says.
    """
    body = _STYLE.sub("", _PROLOGUE.sub("", svg)).strip()
    body = _ID.sub(lambda found: f'id="{prefix}-{found[1]}"', body)
    body = _REFERENCE.sub(lambda found: f"{found[1]}{prefix}-{found[2]}", body)
    opening, close, rest = body.partition(">")
    label = f' class="plot" role="img" aria-label="{escape(description)}"'
    return _SIZE.sub("", opening) + label + close + rest
