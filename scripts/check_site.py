"""Look through the built site: every asset is local, and every link inside it leads somewhere."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
ASSETS = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src", "video": "src"}
HARMLESS = {"canonical", "prev", "next", "edit"}  # kinds of <link> that load nothing


class Page(HTMLParser):
    """Links, assets and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.assets: list[str] = []
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found.get("id", ""), found.get("name", "")}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get(ASSETS.get(tag, "")) and found.get("rel") not in HARMLESS:
            self.assets.append(found[ASSETS[tag]])


def problems() -> list[str]:
    """What would break without internet, and links that lead nowhere."""
    pages = {path: Page(path) for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"}
    found = [] if pages else [f"no pages in {SITE}"]
    for path, page in pages.items():
        name = path.relative_to(SITE)
        for asset in page.assets:
            if urlsplit(asset).scheme not in ("", "data"):
                found.append(f"{name}: loads {asset}")
            elif not asset.startswith("data:") and not (path.parent / urlsplit(asset).path).exists():
                found.append(f"{name}: no file {asset}")
        for link in page.links:
            where = urlsplit(link)
            if where.scheme:
                continue
            target = (path.parent / unquote(where.path)).resolve() if where.path else path
            if not target.exists():
                found.append(f"{name}: no page {link}")
            elif target in pages and unquote(where.fragment) not in pages[target].anchors:
                found.append(f"{name}: no anchor {link}")
    for style in SITE.rglob("*.css"):
        if "url(http" in style.read_text() or "@import" in style.read_text():
            found.append(f"{style.relative_to(SITE)}: loads a style or a font")
    return sorted(set(found))


if __name__ == "__main__":
    for problem in problems():
        print(problem, file=sys.stderr)
    sys.exit(1 if problems() else 0)
