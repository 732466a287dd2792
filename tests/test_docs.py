"""The pages of docs/: every command is run and prints what is shown, every link and path leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import DOCS, README, ROOT, Page, mismatch, session_of

PAGES = [Page(path) for path in DOCS]
RUN = [page for page in PAGES if page.examples]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.path.name, marks=pytest.mark.slow if any(e.is_slow for e in page.examples) else ())
        for page in RUN
    ],
)
def test_a_page_shows_what_its_commands_print(page: Page) -> None:
    examples = page.examples
    differing = []
    with session_of(page) as session:
        for index, example in enumerate(examples):
            follows = examples[index + 1].command if index + 1 < len(examples) else ""
            if text := mismatch(example, session.result(index, with_slow=True), follows):
                differing.append(text)
    assert not differing, "\n\n".join([*differing, f"if this is right: python -m tests.pages {page.path}"])


def test_every_job_has_a_page_and_the_readme_leads_there() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", README.read_text(encoding="utf-8")))
    assert linked == {path.relative_to(ROOT).as_posix() for path in DOCS}
    jobs = ("convert", "shard", "resume-an-old-run", "train-on-a-laptop", "trainium", "hub")
    assert {f"docs/{job}.md" for job in jobs} <= linked


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert [link for link in links if not (path.parent / link).exists()] == []
    named = re.findall(r"`((?:tests|examples|converters|training|tools)/[\w/.]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
