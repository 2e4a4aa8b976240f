"""The page of options is what the schema says."""

from pathlib import Path

from fullshard.config.reference import options_page

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def test_the_page_of_options_is_current():
    text = "It is made with: python -m fullshard.config.reference > docs/options.md"
    assert PAGE.read_text(encoding="utf-8") == options_page(), text
