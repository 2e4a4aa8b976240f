"""The command line's surface. A change here is a change for users: write the new text to the file on purpose."""

from pathlib import Path

import pytest

from fullshard.program.cli.main import main

HERE = Path(__file__).parent / "help"


@pytest.mark.parametrize(
    "verb",
    [
        "",
        "init",
        "train",
        "launch",
        "evaluate",
        "predict",
        "chat",
        "report",
        "config",
        "config check",
        "inspect",
        "plan",
        "export",
        "verify",
        "share",
    ],
)
def test_help_is_as_it_was(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == (HERE / f"{verb.replace(' ', '_') or 'fullshard'}.txt").read_text()
