"""Are pages and messages plain English? `python -m tests.docs.plain_english [PAGE ...]`, a part of `make check`.

A page's sentence has at most 30 words. Neither pages nor programs (messages, docstrings, comments) have the words that read
like a translation. Code, equations, generated tables and docs/appendix/ are left out. Prints one line for each finding. Exit
status: 0 none, 1 some.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers import ROOT

WORDS = 30
BANNED = (
    *(
        "beside",
        "told",
        "anew",
        "alike",
        "at hand",
        "in turns",
        "gone on",
        "goes on",
        "go on with",
        "as it is",
        "as they are",
    ),
    *(
        "what became of",
        "became no number",
        "no number any more",
        "not to be told",
        "is to be had",
        "that people would",
    ),
    r"of (?:its|their|one's) own(?=\s*(?:[.,;:)]|$|and\b|in\b|for\b|which\b))",
    r"(?<!there )(?:is|are) no(?= (?!longer|more)[a-z])",
)
"""Words that a native engineer stumbles over; patterns."""
FOUND = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
GENERATED = ("docs/claims.md",)
"""Pages whose tables come from records alone."""
PROGRAMS = ("birder", "examples", "experiments", "launch", "studies")
PART = re.compile(
    r"^<!-- (?:\{\{|from records).*?^<!-- end -->|^<!-- (trials|step times).*?^<!-- end of \1 -->",
    re.DOTALL | re.MULTILINE,
)
ITEM = re.compile(r"^(?:(?:[-*]|\d\.) |> ?)")


def pages(root: Path = ROOT) -> list[Path]:
    """What a user reads."""
    found = [*root.glob("*.md"), root / "results/README.md", *(root / "docs").rglob("*.md")]
    return sorted(p for p in found if "appendix" not in p.relative_to(root).parts)


def paragraphs(text: str, tables: bool = True) -> Iterator[tuple[int, str]]:
    """(line number, text) of every paragraph, list item and, if wanted, table cell. Code and headings are left out."""
    blank = lambda match: "\n" * match[0].count("\n")  # noqa: E731  keeps line numbers
    text = re.sub(r"^```.*?^```", blank, PART.sub(blank, text), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    start, held = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        plain = line.strip()
        ends = not plain or plain.startswith(("#", "|", "![")) or ITEM.match(plain) or line.startswith("    ")
        if ends and held:
            yield start, held
            held = ""
        if plain.startswith("|"):
            yield from ((number, cell) for cell in plain.strip("|").split(" | ") if tables)
        elif plain and not line.startswith("    ") and not plain.startswith(("#", "![")):
            start, held = (number, ITEM.sub("", plain, count=1)) if not held else (start, f"{held} {plain}")


def findings(text: str, tables: bool = True) -> Iterator[tuple[int, str]]:
    """(line number, what is wrong) of a page."""
    for number, paragraph in paragraphs(text, tables):
        prose = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", paragraph))
        for sentence in re.split(r"(?<=[.!?])[*)\"]*\s+", prose):
            words = re.findall(r"[\w’'-]*\w[\w’'-]*", sentence)
            if len(words) > WORDS:
                yield number, f"{len(words)} words: {sentence}"
        for match in FOUND.finditer(prose):
            yield number, f"{match[0]!r}: {prose[max(0, match.start() - 40) : match.end() + 40]}"


def messages(source: str) -> Iterator[tuple[int, str]]:
    """(line number, what is wrong) of a program's texts of several words, its docstrings and its comments."""
    texts: list[tuple[int, str]] = []
    inside: set[int] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in inside or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts.append((node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "code" for p in parts)))
    lines = io.StringIO(source).readline
    texts += [
        (token.start[0], token.string) for token in tokenize.generate_tokens(lines) if token.type == tokenize.COMMENT
    ]
    for number, said in texts:
        if " " in said:
            prose = re.sub(r"`[^`]*`", "code", said)
            yield from ((number, f"{match[0]!r}: {said}") for match in FOUND.finditer(prose))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line number, what is wrong) of the comments of a YAML file."""
    for number, line in enumerate(source.splitlines(), start=1):
        _, hash_, said = line.partition("#")
        yield from ((number, f"{match[0]!r}: {said}") for match in FOUND.finditer(said) if hash_)


def main(argv: Sequence[str]) -> int:
    wrong = 0
    for program in sorted(p for folder in PROGRAMS for p in (ROOT / folder).rglob("*.py") if not argv):
        for number, said in messages(program.read_text(encoding="utf-8")):
            print(f"{program.relative_to(ROOT)}:{number}: {said}")
            wrong += 1
    for config in sorted(p for p in (ROOT / "conf").rglob("*.yaml") if not argv):
        for number, said in comments(config.read_text(encoding="utf-8")):
            print(f"{config.relative_to(ROOT)}:{number}: {said}")
            wrong += 1
    for page in [Path(name).resolve() for name in argv] or pages():
        name = page.relative_to(ROOT).as_posix()
        for number, said in findings(page.read_text(encoding="utf-8"), tables=name not in GENERATED):
            print(f"{name}:{number}: {said}")
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
