"""mkdocs: pages that lie beside docs/ (dated results, the changelog) or are made become part of the site."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ["benchmarks/results", "examples", "CHANGELOG.md", "CONTRIBUTING.md"]
SHOWN = (".md", ".png", ".py", ".sbatch", ".sh", ".yaml")  # examples are links to their source


def on_files(files: Files, config: Any) -> Files:
    """Add what docs/ links to outside of itself, under its own path, and the pages that are made."""
    for name in OUTSIDE:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SHOWN)
        for each in found:
            relative = each.relative_to(ROOT).as_posix()
            files.append(File(relative, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    files.append(File.generated(config, "cli.md", content=_cli_page()))
    return files


def _cli_page() -> str:
    """The commands as this tree has them, whatever mics is installed."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
    try:
        from cli_reference import page

        return page()
    finally:
        del sys.path[:2]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of docs/ climb one folder more than those of the site; links to sources become plain text."""
    outside = page.file.src_uri.startswith(tuple(OUTSIDE))
    known = {file.src_uri for file in files}
    folder = (ROOT if outside else ROOT / "docs") / Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if "://" in target or not target:
            return match.group(0)
        path = (folder / target).resolve()
        try:
            relative = path.relative_to(ROOT).as_posix()
        except ValueError:
            return text
        uri = relative.removeprefix("docs/") if relative.startswith("docs/") else relative
        if uri not in known:
            return text if not text.startswith("!") else match.group(0)
        depth = len(Path(page.file.src_uri).parts) - 1
        return f"[{text}]({'../' * depth}{uri}{anchor})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", link, _spaced(markdown))


def _spaced(markdown: str) -> str:
    """With a blank line before each list, which Markdown elsewhere does not ask for."""
    lines: list[str] = []
    in_code = False
    for line in markdown.splitlines():
        in_code ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        begins = re.match(r"(?:[-*]|\d+\.) ", line) and not in_code
        if begins and before and not re.match(r"(?:[-*]|\d+\.|#+) | |<!--", before):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Mark tables of words, and tell their cells the headings: phones show them as lists (docs/site.css)."""
    return re.sub(r"<table>(.*?)</table>", _marked, html, flags=re.DOTALL)


def _marked(table: re.Match[str]) -> str:
    cells = re.findall(r"<th[^>]*>(.*?)</th>", table[1], re.DOTALL)
    headings = [re.sub(r"<[^>]+>", "", cell) for cell in cells]
    longest = max((len(cell) for cell in re.findall(r"<td>(.*?)</td>", table[1], re.DOTALL)), default=0)
    if "text-align: right" in table[1] or len(headings) > 6 or (len(headings) > 4 and longest < 60):
        return table[0]

    def row(found: re.Match[str]) -> str:
        # Of two columns the first is the title of the second, which needs no other.
        labels = iter(headings if len(headings) > 2 else [])

        def cell(opening: re.Match[str]) -> str:
            heading = next(labels, "")
            return f'<td data-heading="{escape(heading)}">' if heading else "<td>"

        return re.sub(r"<td>", cell, found[0])

    return f"<table data-words>{re.sub(r'<tr[^>]*>.*?</tr>', row, table[1], flags=re.DOTALL)}</table>"
