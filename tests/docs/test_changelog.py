"""The changelog's versions: Unreleased first, then dated ones, the newest of which is the package's."""

import datetime
import re
from pathlib import Path

from fullshard.version import __version__

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def test_versions_are_dated_and_the_newest_is_the_packages():
    titles = re.findall(r"^## (.+)$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    if titles[0] == "Unreleased":
        titles = titles[1:]
    versions = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - (\d{4}-\d\d-\d\d)", title) for title in titles]
    assert all(versions), titles
    numbers = [tuple(int(part) for part in version.groups()[:3]) for version in versions]
    dates = [datetime.date.fromisoformat(version[4]) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert ".".join(map(str, numbers[0])) == __version__
