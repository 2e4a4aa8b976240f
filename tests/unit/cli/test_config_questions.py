"""Accelerate's questions as a user of ``fullshard config`` meets them, in a pseudo-terminal and without one.

Menus take the number of a choice, counted from 0, and Enter (a carriage return, as keyboards send it).
"""

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time

import pytest

from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.program.cli import config, main as cli
from support.accelerate_files import VERSION_1

SECONDS = 60


class Terminal:
    """A pseudo-terminal in which ``fullshard config`` runs."""

    def __init__(self, directory, *arguments):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "TERM": "dumb"}
        self.output, outer = "", pty.openpty()
        self.side, inner = outer
        command = [sys.executable, "-m", "fullshard", "config", *arguments]
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
        """Answer a question, which is asked again after a wrong answer; what was shown in between."""
        shown = ""
        for text in texts:
            shown += self.until(question)
            self.say(f"{text}\n")
        return shown

    def choose(self, question, keys=""):
        """Press keys and Enter in a menu, once it reads single keys; before, the terminal would change them."""
        self.until(question)
        end = time.monotonic() + SECONDS
        while termios.tcgetattr(self.side)[3] & termios.ICANON:
            assert time.monotonic() < end, f"{question!r} takes no keys; the screen is {self.output!r}"
            self._read(0.01)
        self.say(f"{keys}\r")

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


def test_questions_are_answered_and_the_file_is_written_checked_and_explained(tmp_path, start):
    terminal = start("--config_file", "mine.yaml")
    terminal.choose("In which compute environment")
    terminal.choose("Which type of machine", "4")
    terminal.answer("How many different machines", "none", "2")
    terminal.choose("What is the rank of this machine", "1")
    terminal.answer("IP address", "10.0.0.1")
    terminal.answer("What is the port", "29501")
    for question in ("same local network", "Should distributed operations be checked", "torch dynamo", "DeepSpeed"):
        terminal.answer(question, "")
    shown = terminal.answer("FullyShardedDataParallel", "maybe", "yes")
    assert "Please enter yes or no" in shown
    terminal.choose("your FSDP version", "0")
    terminal.choose("sharding strategy", "3")
    terminal.answer("offload parameters", "yes")
    terminal.choose("auto wrap policy")
    terminal.answer("_no_split_modules", "")
    terminal.answer("transformer layer class names", "T5Block")
    terminal.choose("backward prefetch policy", "2")
    terminal.choose("state dict type", "2")
    for question in ("forward prefetch", "use_orig_params", "RAM efficient"):
        terminal.answer(question, "")
    terminal.answer("activation checkpointing", "yes")
    terminal.answer("How many GPU(s)", "4")
    terminal.choose("mixed precision", "2")
    screen, code = terminal.end()
    assert code == 0, screen
    assert "What it means" in screen
    assert "HYBRID_SHARD: FULL_SHARD inside each machine" in screen
    assert "fullshard launch --config_file mine.yaml script.py" in screen
    file = read_accelerate_file(tmp_path / "mine.yaml")
    assert (file.num_machines, file.machine_rank, file.main_process_ip) == (2, 1, "10.0.0.1")
    assert (file.main_process_port, file.num_processes, file.mixed_precision) == (29501, 4, "bf16")
    assert file.fsdp["fsdp_transformer_layer_cls_to_wrap"] == ("T5Block",)
    assert (file.strategy, file.backward_prefetch) == ("HYBRID_SHARD", "NO_PREFETCH")
    assert file.fsdp["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert file.fsdp["fsdp_activation_checkpointing"] is True
    assert file.fsdp["fsdp_offload_params"] is True
    assert file.warnings == ()
    assert os.listdir(tmp_path) == ["mine.yaml"]


@pytest.mark.parametrize(
    ("keys", "code", "told"),
    [("\x03", 130, "interrupted"), pytest.param("\x04", 2, "nothing was written", marks=pytest.mark.slow)],
)
def test_ctrl_c_and_the_end_of_input_write_nothing(tmp_path, start, keys, code, told):
    terminal = start()
    terminal.choose("In which compute environment")
    terminal.choose("Which type of machine", "4")
    terminal.until("How many different machines")
    terminal.say(keys)
    screen, ended = terminal.end(again=keys)
    assert ended == code
    assert told in screen
    assert "Traceback" not in screen
    assert os.listdir(tmp_path) == []


# The answers that the guide of PEFT and Accelerate takes; an empty one is Accelerate's default.
FSDP = ("0", "4", "1", "", "", "", "yes")
GUIDES = (*FSDP, "0", "0", "yes", "0", "no", "T5Block", "0", "0", "", "", "", "no", "2", "0")


@pytest.fixture
def answers(monkeypatch):
    """Types for the user: lines by lines, the end of the input when they are used up."""

    def use(*lines):
        typed = iter(lines)

        def next_line(prompt=""):
            print(prompt)
            if (line := next(typed, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr(config.sys.stdin, "isatty", lambda: True, raising=False)
        # Accelerate's menus read lines where there are no keys to read, as in a notebook.
        monkeypatch.setattr("accelerate.commands.menu.selection_menu.in_colab", True)
        monkeypatch.setattr("builtins.input", next_line)

    return use


def test_the_guides_answers_make_the_guides_file_which_starts_a_script(tmp_path, monkeypatch, capfd, answers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answers(*GUIDES)
    assert cli.main(["config", "--config_file", "fsdp_config.yaml"]) == 0
    (tmp_path / "guides.yaml").write_text(VERSION_1)
    ours, guides = read_accelerate_file("fsdp_config.yaml"), read_accelerate_file("guides.yaml")
    assert (ours.strategy, ours.backward_prefetch) == (guides.strategy, guides.backward_prefetch)
    assert (ours.num_processes, ours.mixed_precision) == (guides.num_processes, guides.mixed_precision)
    for key in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "offload_params", "state_dict_type"):
        assert ours.fsdp[f"fsdp_{key}"] == guides.fsdp[f"fsdp_{key}"]
    names = "'FSDP_SHARDING_STRATEGY', 'FSDP_OFFLOAD_PARAMS', 'FSDP_TRANSFORMER_CLS_TO_WRAP', 'WORLD_SIZE'"
    (tmp_path / "script.py").write_text(f"import os\nprint(*(os.environ[name] for name in ({names})))\n")
    capfd.readouterr()
    assert cli.main(["launch", "--config_file", "fsdp_config.yaml", "script.py"]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[rank {rank}] FULL_SHARD true T5Block 2" for rank in range(2)]


def test_answers_that_fullshard_or_accelerate_refuses_are_told(tmp_path, monkeypatch, answers, refused):
    monkeypatch.chdir(tmp_path)
    answers("1", "0")  # Amazon SageMaker
    assert cli.main(["config"]) == 2
    assert os.listdir(tmp_path) == []
    answers("0", "10", *[""] * 6)  # a TPU
    assert "not on TPUs" in refused(2, "config")
    answers("yes", "0", "4", "1", "", "", "yes")  # DeepSpeed, which is not installed
    assert "Accelerate refuses these answers, and nothing was written: DeepSpeed" in refused(2, "config")


def test_json_is_alone_on_standard_output(tmp_path, capsys, answers):
    answers(*GUIDES)
    path = tmp_path / "f.json"
    assert cli.main(["config", "--json", "--config_file", str(path)]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "sharding strategy?" in captured.err
    assert result["path"] == str(path)
    assert result["config"] == json.loads(path.read_text())
    assert result["next"][0] == f"fullshard train run.yaml --config_file {path}"


def test_a_file_that_exists_is_overwritten_after_a_yes_only(tmp_path, answers, refused):
    path = tmp_path / "f.yaml"
    path.write_text("mine\n")
    for lines in (("",), ("no",), ("what", "n")):
        answers(*lines)
        assert "was left unchanged" in refused(2, "config", "--config_file", path)
    assert "does not overwrite" in refused(2, "config", "--default", "--config_file", path)
    assert path.read_text() == "mine\n"
    answers("yes", *GUIDES)
    assert cli.main(["config", "--config_file", str(path)]) == 0
    assert read_accelerate_file(path).is_sharded


def test_without_a_terminal_nothing_is_asked(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config.sys.stdin, "isatty", lambda: False, raising=False)
    assert "--default" in refused(2, "config")
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path, refused):
    assert "f.yaml" in refused(2, "config", "--default", "--config_file", str(tmp_path / "no" / "f.yaml"))


@pytest.mark.parametrize("option", [["--default"], ["--json"], ["--config_file", "f.yaml"]])
def test_options_of_the_questions_do_not_stand_before_an_action(option, refused):
    assert f"Put {option[0]} after the action" in refused(2, "config", *option, "check", "f.yaml")
