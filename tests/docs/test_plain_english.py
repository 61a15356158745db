"""The check of sentences and words finds what it must, and leaves code, tables of records and appendices alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.plain_english import comments, findings, messages, pages

LONG = "word " * 31 + "end."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (LONG, 1),
        (f"- a short item\n- {LONG}", 1),
        (f"| short | {LONG} |", 1),
        ("One fact is here. " * 20, 0),
        (f"```\n{LONG}\n```", 0),
        (f'<!-- {{{{ spread("x") }}}} -->\n| {LONG} |\n<!-- end -->\n', 0),
        ("[" + "word " * 20 + "](a-very-long-link-that-holds-many-words-and-more-words)", 0),
        ("It stands beside the other.", 1),
        ("A run is no test. It is no longer one.", 1),
        ("`beside` is code.", 0),
    ],
)
def test_what_is_found(text: str, count: int) -> None:
    assert len(list(findings(text))) == count


def test_a_finding_names_its_line() -> None:
    assert [number for number, _ in findings(f"# Title\n\nShort.\n\n{LONG}\n")] == [5]


def test_texts_docstrings_and_comments_of_programs_are_checked() -> None:
    program = (
        '"""It stands beside `beside`."""\nkey = "beside"\nprint(f"{key} is made\\nanew")\n'
        'raise ValueError("it is no number")\nkey = 1  # is no number\n'
    )
    assert sorted(number for number, _ in messages(program)) == [1, 3, 4, 5]
    assert [number for number, _ in comments("# goes on\nkey: beside  # `x` is told\n")] == [1, 2]


def test_appendices_are_left_out(tmp_path: Path) -> None:
    for name in ("README.md", "results/README.md", "docs/a.md", "docs/methods/b.md", "docs/appendix/c.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    assert [p.relative_to(tmp_path).as_posix() for p in pages(tmp_path)] == [
        *("README.md", "docs/a.md", "docs/methods/b.md", "results/README.md"),
    ]
