"""The code blocks of README.md, docs/start, docs/guides and of the page on shards run as they are printed."""

import subprocess

import pytest

from fullshard.program.cli.main import parse
from fullshard.program.config import load_run
from support.doc_blocks import ROOT, blocks_of, run_block, write_given, write_readers_files

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs/guides").glob("*.md")),
    ROOT / "docs/concepts/what-a-shard-is.md",
]
FAST = {"report.md"}
NEEDS = {"lightning.md": "lightning"}
LANGUAGES = {"bash", "python", "yaml", "text"}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def readers_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    write_readers_files(folder)
    return folder


@pytest.fixture
def folder(readers_files, tmp_path):
    for file in readers_files.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_valid(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    blocks = list(blocks_of(page))
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks)
    for block in blocks:
        where = f"{page.name}:{block.line}"
        assert block.language in LANGUAGES, where
        if block.language == "python":
            compile(block.code, where, "exec")
        elif block.language == "yaml":
            (folder / block.title).write_text(block.code)
            load_run(block.title)
        elif block.language == "bash":
            subprocess.run(["bash", "-n", "-c", block.code], check=True)
            for arguments in block.commands():
                parse(arguments)


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=() if page.name in FAST else pytest.mark.slow) for page in PAGES],
)
def test_blocks_run(page, folder):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    write_given(page, folder)
    for block in blocks_of(page):
        if not block.not_run and block.language != "text":
            run_block(block, folder)
