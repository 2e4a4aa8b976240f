"""Links between pages hold, generated pages are current, tables are for look-ups, and every page is in the site."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]


def text_of(page):
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page):
    """Anchors of the page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def name_of(page):
    return str(page.relative_to(ROOT))


def test_generated_pages_are_current():
    stale = runpy.run_path(str(DOCS / "generate.py"))["stale_pages"]()
    assert stale == [], "Write them with: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors_of(found), target


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=name_of)
def test_tables_are_for_lookups(page):
    rows = re.findall(r"^\|(.+)\|$", text_of(page), re.MULTILINE)
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(re.sub(r"`[^`]*`", "x", cell).split()) > 15] == []


def test_every_page_is_in_the_site():
    listed = re.findall(r"[\w\-/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["docs_dir"] == "docs"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_on_a_page_exist(page):
    named = re.findall(r"`((?:tests|benchmarks|examples|docs)/[\w/.\-]+)", text_of(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readers_are_told_to_import_public_names_only():
    public = re.compile(r"fullshard(\.optim|\.compat(\.\w+)*)?")
    code = {page: page.read_text(encoding="utf-8") for page in (*PAGES, *ROOT.glob("examples/**/*.py"))}
    imported = re.compile(r"^\s*(?:from|import) (fullshard[.\w]*)", re.MULTILINE)
    private = {(name_of(page), name) for page, text in code.items() for name in imported.findall(text)}
    assert [one for one in sorted(private) if not public.fullmatch(one[1])] == []
