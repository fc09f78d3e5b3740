"""Read the project's prose as an editor would: `make lint` prints what this finds, and passes all the same.

Markdown: lines over 120 columns, paragraphs over six lines, sentences over 30 words. Markdown and Python:
words that we no longer use, with those we use instead, and public names that `mics` has given up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_COLUMNS, MAX_LINES, MAX_WORDS = 120, 6, 30
HISTORY = {"log.md", "CHANGELOG.md"}  # what was said at the time
WORDS = {
    r"sen[dt]s? for": "prefetch",
    r"comput(?:ed|es|ing) again": "recompute",
    r"let(?:s|ting)? go of": "free, evict",
    r"is had|are had": "is available",
    r"gives? back|given back": "free",
    r"put off": "deferred",
    r"\blent\b|\blends?\b": "freed while unused",
    r"micro-?steps? (?:is|was|are) announced": "the last micro-batch is known",
}
OLD_NAMES = {
    r"mics\.summon\b(?!_)": "mics.summon_full_params",
    r"mics\.audit\(": "mics.audit_replicas",
    r"mics\.memory\(": "mics.memory_report",
    r"\blean=(?!\")": "low_memory=",
    r"Precision\((?:param|reduce|master)=": "Precision(param_dtype=, reduce_dtype=, master_dtype=)",
}


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Plain paragraphs and list entries, each with the number of its first line; no code, no tables."""
    found: list[str] = []
    first, in_code = 0, False
    text = re.sub(r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        is_prose = not (in_code or is_fence or re.match(r"\s*$|#|\||    |!\[|<", line))
        starts = bool(re.match(r"\s*(?:[-*]|\d+\.) ", line))
        if found and (not is_prose or starts):
            yield first, found
            found = []
        if is_prose:
            first = first if found else number
            found.append(line)


def long_passages(path: Path, text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS and not line.startswith("|") and "](" not in line[MAX_COLUMNS:]:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"
    if path.name in HISTORY:
        return
    for number, lines in paragraphs(text):
        if len(lines) > MAX_LINES:
            yield number, f"a paragraph of {len(lines)} lines, at most {MAX_LINES}"
        for sentence in re.split(r"(?<=[.:;?!])\s+", re.sub(r"`[^`]*`", "code", " ".join(lines))):
            if len(sentence.split()) > MAX_WORDS:
                yield number, f"a sentence of {len(sentence.split())} words: {sentence[:60]}..."


def old_words(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, new in {**WORDS, **OLD_NAMES}.items():
            if found := re.search(pattern, line):
                yield number, f"{found.group()!r}: rather {new}"


def main() -> int:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    num_found = 0
    for path in sorted([*pages, *sources]):
        text = path.read_text()
        found = list(long_passages(path, text)) if path.suffix == ".md" else []
        found += old_words(text) if path.name not in HISTORY else []
        for number, what in sorted(found):
            print(f"{path.relative_to(ROOT)}:{number}: {what}")
        num_found += len(found)
    print(f"prose: {num_found} places to look at" if num_found else "prose: nothing found")
    return 1 if "--strict" in sys.argv[1:] and num_found else 0


if __name__ == "__main__":
    sys.exit(main())
