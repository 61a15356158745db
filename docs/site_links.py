"""A hook of mkdocs: pages link to files of the repository as on a code host; the site holds those files too.

A file outside docs/ keeps its path: README.md is the site's first page, results/published/tables/resnet50.md a page,
conf/config.yaml a file to read. Whatever a page links is added, and its links in turn. A folder is linked by its README.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()((?![a-z]+:|#)[^)\s#]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
SOURCES = (".py", ".yaml", ".toml", ".cff", ".bib", "")
"""Text that a browser would download instead of showing: served as .txt."""


def in_repository(uri: str) -> str:
    """The path in the repository of a file of the site."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def in_site(path: str) -> str:
    """The path in the site's sources of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{path}.txt" if PurePosixPath(path).suffix in SOURCES else path


def target(uri: str, link: str) -> str:
    """The path in the repository of what a page links to. Raises PluginError for a broken link."""
    path = os.path.normpath(os.path.join(os.path.dirname(in_repository(uri)), link))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    if path.startswith("..") or not (ROOT / path).is_file():
        raise PluginError(f"{in_repository(uri)} links to {link}, which is not there")
    return path


def outside_code(text: str) -> list[str]:
    """Pieces of a page; those with an odd number are code."""
    return CODE.split(text)


def on_files(files: Files, config: Any) -> Files:
    """Adds every file outside docs/ that a page of the site links to, and those that these link to."""
    waiting = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/README.md"]
    for page in files.documentation_pages(inclusion=InclusionLevel.is_included):
        waiting += linked(page.src_uri, Path(str(page.abs_src_path)).read_text("utf-8"))
    while waiting:
        path = waiting.pop()
        uri = in_site(path)
        if path.startswith("docs/") or files.get_file_from_path(uri) is not None:
            continue
        known = uri in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/README.md")
        inclusion = InclusionLevel.INCLUDED if known else InclusionLevel.NOT_IN_NAV
        if uri.endswith(".md"):
            text = (ROOT / path).read_text("utf-8")
            files.append(File.generated(config, uri, content=text, inclusion=inclusion))
            waiting += linked(path, text)
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path), inclusion=inclusion))
    return files


def linked(uri: str, text: str) -> list[str]:
    """Paths in the repository of all files that a page links to."""
    return [target(uri, match[2]) for part in outside_code(text)[::2] for match in LINK.finditer(part)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them."""
    here = os.path.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        there = in_site(target(page.file.src_uri, match[2]))
        return f"{match[1]}{os.path.relpath(there, here or '.')}{match[3] or ''}{match[4]}"

    parts = outside_code(markdown)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)
