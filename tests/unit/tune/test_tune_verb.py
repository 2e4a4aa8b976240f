"""Starting ranks again after they lost a candidate."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

from fullshard.program.cli import tune as verb
from fullshard.program.launch import Failure
from fullshard.program.tune.candidates import Candidate
from fullshard.program.tune.journal import Journal
from support.alone import alone


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


def test_the_candidate_in_which_the_system_killed_a_rank_is_left_out(monkeypatch):
    """A rank that is killed writes nothing; the note of what was begun stays."""
    started = []
    candidate = Candidate(attention="bias_sdpa")

    def start_ranks(program, arguments, nproc, *, saves):
        started.append(arguments)
        journal = Path(arguments[-1].partition("=")[2])
        notes = Journal(journal.with_name(f"{journal.name}.key"), alone())
        if len(started) == 1:
            notes.begin(candidate)
            return Failure(1, "Killed", "rank 1 was ended by SIGKILL", None, 137, 0.0)
        reasons.append(notes.take(candidate))
        return None

    reasons = []
    monkeypatch.setattr(verb, "start_ranks", start_ranks)
    monkeypatch.setattr(verb, "load_run", lambda *_: SimpleNamespace(nproc=2))
    options = Namespace(config=Path("run.yaml"), overrides=[], json=False, minutes=5.0)
    assert verb.run(options) is None
    assert len(started) == 2
    assert "killed" in reasons[0]
