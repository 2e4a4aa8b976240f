"""Starting ranks again after they lost a candidate."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

from fullshard.program.cli import tune as verb
from fullshard.program.launch import Failure


def test_ranks_start_again_after_a_loss_but_not_if_they_fail_when_all_is_measured(monkeypatch):
    """At the end they remove the journal and its losses, and may then fail to write the run file."""
    started, lost = [], Failure(1, "MemoryLimitError", "out of memory", None, 11, 0.0)
    unwritten = Failure(0, "ConfigError", "it is read-only", None, 2, 0.0)

    def start_ranks(program, arguments, nproc, *, saves):
        started.append(arguments)
        journal = Path(arguments[-1].partition("=")[2])
        file = journal.with_name(f"{journal.name}.1.lost")
        if len(started) == 1:
            file.write_text("{}")
            return lost
        file.unlink(missing_ok=True)
        return unwritten

    monkeypatch.setattr(verb, "start_ranks", start_ranks)
    monkeypatch.setattr(verb, "load_run", lambda *_: SimpleNamespace(nproc=2))
    options = Namespace(config=Path("run.yaml"), overrides=[], json=False, minutes=5.0)
    assert verb.run(options) is unwritten
    assert len(started) == 2
