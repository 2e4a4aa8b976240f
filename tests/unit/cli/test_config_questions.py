"""The questionnaire as a user meets it: in a pseudo-terminal, with wrong answers on the way, and without a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest
import yaml

from fullshard.cli import main as cli, questionnaire
from fullshard.compat.accelerate_config.file import read_accelerate_file
from support.tiny_run import MODEL

SECONDS = 60


class Terminal:
    """A pseudo-terminal in which ``fullshard config`` runs."""

    def __init__(self, directory, *arguments):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "TERM": "dumb"}
        self.output, outer = "", pty.openpty()
        self.side, inner = outer
        command = [sys.executable, "-m", "fullshard.cli.main", "config", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(inner)

    def _read(self, seconds):
        if select.select([self.side], [], [], seconds)[0]:
            try:
                data = os.read(self.side, 65536)
            except OSError:  # the other side is closed
                return False
            self.output += data.decode()
            return bool(data)
        return True

    def until(self, text):
        """Read on to ``text``; what came before it."""
        end = time.monotonic() + SECONDS
        while text not in self.output:
            assert time.monotonic() < end, f"{text!r} did not come; the screen is {self.output!r}"
            assert self._read(1.0) or text in self.output, f"ended before {text!r}: {self.output!r}"
        before, _, self.output = self.output.partition(text)
        return before

    def say(self, text):
        os.write(self.side, text.encode())

    def answer(self, question, *texts):
        """Answer a question, several times where the first are wrong; what was shown in between."""
        shown = self.until(question)
        for text in texts:
            shown += self.until("): ")
            self.say(f"{text}\n")
        return shown

    def end(self, again=""):
        """The rest of the screen and the exit code; keys are pressed ``again`` while nothing happens, as people do.

        Python forgets an interrupt that arrives while a finaliser runs.
        """
        now = time.monotonic()
        end, press = now + SECONDS, now + 5
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it did not end; the screen is {self.output!r}"
            self._read(0.1)
            if again and time.monotonic() > press:
                press += 5
                self.say(again)
        while select.select([self.side], [], [], 0)[0] and self._read(0):
            pass
        return self.output, self.process.returncode

    def close(self):
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.side)


@pytest.fixture
def start(tmp_path):
    """Starts ``fullshard config`` in a terminal of its own."""
    started = []

    def run(*arguments):
        started.append(Terminal(tmp_path, *arguments))
        return started[-1]

    yield run
    for terminal in started:
        terminal.close()


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 64}))
    return directory


def test_the_questionnaire_takes_answers_refuses_wrong_ones_and_writes_an_explained_file(tmp_path, model, start):
    terminal = start("--config_file", "mine.yaml")
    terminal.answer("How many machines", "none", "2")
    terminal.answer("Number of this machine", "2", "1")
    shown = terminal.answer("Address of machine 0", "", "10.0.0.1")
    assert "Expected a host name or an IP address" in shown  # this machine's own name would be machine 1's
    terminal.answer("Port on machine 0", "")
    terminal.answer("Train on the CPU", "")
    shown = terminal.answer("How many ranks", "?", "3", "4")
    assert "A rank is a process" in shown
    assert "Expected a multiple of 2" in shown
    assert "got '3'" in shown
    shown = terminal.answer("Sharding strategy?", "SHARD_EVERYTHING", "hybrid_shard")
    assert "3 NO_SHARD: every rank holds the full model" in shown
    assert "Expected one of 1 FULL_SHARD" in shown
    terminal.answer("Wrap policy", "1")
    shown = terminal.answer("Directory or Hub id", "nothing/here-at-all", str(model))
    assert "Cannot build a model from 'nothing/here-at-all'" in shown
    shown = terminal.answer("Layer classes to wrap", "T5Blok", "1")
    assert "1 T5Block: 4 modules" in shown
    assert "did you mean T5Block?" in shown
    terminal.answer("Backward prefetch", "3")
    terminal.answer("State-dict type", "SHARDED_STATE_DICT")
    terminal.answer("Recompute activations", "maybe", "yes")
    terminal.answer("Precision", "bf16")
    screen, code = terminal.end()
    assert code == 0
    assert "What it means" in screen
    assert "fullshard launch --config_file mine.yaml script.py" in screen
    file = read_accelerate_file(tmp_path / "mine.yaml")
    assert (file.num_machines, file.machine_rank, file.main_process_ip) == (2, 1, "10.0.0.1")
    assert (file.main_process_port, file.num_processes, file.mixed_precision) == (29500, 4, "bf16")
    assert file.fsdp["fsdp_transformer_layer_cls_to_wrap"] == ("T5Block",)
    assert (file.strategy, file.backward_prefetch) == ("HYBRID_SHARD", "NO_PREFETCH")
    assert file.fsdp["fsdp_activation_checkpointing"] is True
    assert file.warnings == ()
    assert set(os.listdir(tmp_path)) == {"mine.yaml", "model"}


@pytest.mark.parametrize(("keys", "code", "told"), [("\x03", 130, "interrupted"), ("\x04", 2, "nothing was written")])
def test_ctrl_c_and_the_end_of_input_write_nothing(tmp_path, start, keys, code, told):
    terminal = start()
    terminal.answer("How many machines", "")
    terminal.until("): ")
    terminal.say(keys)
    screen, ended = terminal.end(again=keys)
    assert ended == code
    assert told in screen
    assert "Traceback" not in screen
    assert os.listdir(tmp_path) == []


@pytest.fixture
def answers(monkeypatch):
    """Types for the user: lines by lines, Enter when they are used up."""

    def use(*lines):
        typed = iter(lines)
        monkeypatch.setattr(questionnaire.sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda *_: next(typed, ""))

    return use


def test_enter_on_every_question_is_the_file_of_default(tmp_path, monkeypatch, capsys, answers):
    monkeypatch.chdir(tmp_path)
    answers()
    assert cli.main(["config"]) == 0
    assert cli.main(["config", "--default", "--config_file", "other.yaml"]) == 0
    assert (tmp_path / "fsdp_config.yaml").read_text() == (tmp_path / "other.yaml").read_text()
    assert "other.yaml" in capsys.readouterr().out


def test_json_is_alone_on_standard_output(tmp_path, capsys, answers):
    answers()
    path = tmp_path / "f.yaml"
    assert cli.main(["config", "--json", "--config_file", str(path)]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "Sharding strategy?" in captured.err
    assert result["path"] == str(path)
    assert result["config"] == yaml.safe_load(path.read_text())
    assert result["next"][0] == f"fullshard train run.yaml --config_file {path}"


def test_a_file_that_exists_is_overwritten_after_a_yes_only(tmp_path, capsys, answers):
    path = tmp_path / "f.yaml"
    path.write_text("mine\n")
    for lines in ((), ("no",), ("what", "n")):
        answers(*lines)
        assert cli.main(["config", "--config_file", str(path)]) == 2
        assert "was left unchanged" in capsys.readouterr().err
    assert cli.main(["config", "--default", "--config_file", str(path)]) == 2
    assert "does not overwrite" in capsys.readouterr().err
    assert path.read_text() == "mine\n"
    answers("yes")
    assert cli.main(["config", "--config_file", str(path)]) == 0
    assert read_accelerate_file(path).is_sharded


def test_without_a_terminal_nothing_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(questionnaire.sys.stdin, "isatty", lambda: False, raising=False)
    assert cli.main(["config"]) == 2
    assert "--default" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path, capsys):
    assert cli.main(["config", "--default", "--config_file", str(tmp_path / "no" / "f.yaml")]) == 2
    assert re.search(r"f\.yaml cannot be written", capsys.readouterr().err)


@pytest.mark.parametrize("option", [["--default"], ["--json"], ["--config_file", "f.yaml"]])
def test_options_of_the_questions_do_not_stand_before_an_action(option, capsys):
    assert cli.main(["config", *option, "convert", "f.yaml"]) == 2
    assert f"Put {option[0]} after the action" in capsys.readouterr().err
