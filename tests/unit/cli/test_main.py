"""What the command line says and how it ends: exit codes by kind, one clean message, JSON where asked for."""

import json
import subprocess
import sys

import pytest

from fullshard import __version__
from fullshard.errors import InvariantError
from fullshard.program.cli import common, main as cli, train as train_verb
from fullshard.program.launch import Failure
from support.tiny_run import write_run_file


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fullshard {__version__}\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trian", "usage: fullshard"),
        ("train", "the following arguments are required: CONFIG\n"),  # and not those that may be left out
        ("train x.yaml --jsn --a=b", "unrecognized arguments: --jsn --a=b"),
        ("inspect", "required: PATH\n"),
        ("inspect x.yaml --world-size 0", "must be a whole number of at least 1; got '0'"),
        ("export x", "required: -o/--output"),
        ("export x -o y seed=3", "unrecognized arguments: seed=3"),
        ("export x -o y --merge --adapter", "not allowed with"),
        ("export x -o y --dtype int8", "invalid choice: 'int8'"),
        ("verify", "required: PATH"),
        ("verify x seed=3", "unrecognized arguments: seed=3"),
        ("config check x.yaml --jsn", "fullshard config check: error: unrecognized arguments: --jsn"),
        *(
            (f"plan run.yaml --memory={text}", "must be a size above zero, such as 80GB")
            for text in ("", "GB", "-1GB", "0")
        ),
        *(
            (f"plan run.yaml --gpu h100 --price={text}", f"must be a number of at least 0; got '{text}'")
            for text in ("-1", "nan", "inf", "two")
        ),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_its_verbs_usage(line, said, refused):
    error = refused(2, *line.split(" "))
    assert said in error
    assert error.startswith(f"usage: fullshard{' config check' * line.startswith('config')}")


def test_settings_may_stand_on_both_sides_of_an_option():
    options = cli.parse(["train", "x.yaml", "a=1", "--json", "b=2", "c=3"])
    assert options.overrides == ["a=1", "b=2", "c=3"]
    assert options.json


@pytest.mark.parametrize("verb", ["train", "inspect"])
def test_a_wrong_setting_is_one_message_and_no_traceback(verb, tmp_path, capsys):
    path = write_run_file(tmp_path)
    assert cli.main([verb, str(path), "training.learning_rat=1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ConfigError: ")
    assert "training.learning_rate" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_errors_are_json_too(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "none.yaml"), "--json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["kind"] == "ConfigError"
    assert error["exit_code"] == 2
    assert error["message"] in captured.err


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"data__source_column": "txt"}, 3, "DataError: "),
        ({"model": {"config": {"model_type": "t6"}, "tokenizer": {}}}, 4, "ModelError: "),
        ({"sharding__wrap": ["T5Blok"]}, 5, "WrapError: "),
    ],
)
def test_each_kind_of_error_has_its_exit_code(tmp_path, capsys, changes, code, text):
    path = write_run_file(tmp_path, **changes)
    assert cli.main(["inspect", str(path)]) == code
    assert capsys.readouterr().err.startswith(text)


def test_a_broken_promise_comes_with_its_traceback(tmp_path, monkeypatch, refused):
    def fail(_path, _overrides):
        raise InvariantError("impossible")

    monkeypatch.setattr(train_verb, "load_run", fail)
    assert "Traceback" in refused(70, "train", "x.yaml")


def test_inspect_prints_the_table(tmp_path, done):
    path = write_run_file(tmp_path)
    assert "units over 2 ranks" in done("inspect", path)  # nproc of the run file
    table = json.loads(done("inspect", path, "--world-size", "3", "--json"))
    assert table["world_size"] == 3
    names = [unit["unit"] for unit in table["units"]]
    assert names == ["(root)", "encoder.block.0 .. 1", "decoder.block.0 .. 1"]


def test_an_empty_command_line_is_answered_with_an_overview(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    found = capsys.readouterr()
    assert found.err == ""
    assert all(verb in found.out for verb in ("init", "train", "plan", "examples:", "exit codes:"))


def test_train_starts_the_rank_program_and_passes_on_its_failure(tmp_path, capsys, monkeypatch):
    path = write_run_file(tmp_path)
    started = []
    failure = Failure(1, "ValueError", "broken", "Traceback: broken", 1, 0.0)
    monkeypatch.setattr(common, "launch", lambda command, nproc, **_: started.append((command, nproc)) or failure)
    assert cli.main(["train", str(path), "seed=4", "--json"]) == 1
    ((command, nproc),) = started
    assert command[1:] == ["-m", "fullshard.program.launch.programs.train", str(path), "seed=4", "--json"]
    assert nproc == 2
    captured = capsys.readouterr()
    first, *others = captured.err.splitlines()
    assert first.startswith("fullshard: starting 2 ranks; importing torch")
    assert others == ["Rank 1 failed first:", "Traceback: broken"]
    assert json.loads(captured.out)["error"]["rank"] == 1


def test_a_place_where_nothing_can_be_written_is_said_before_ranks_are_started(tmp_path, capsys, monkeypatch):
    path = write_run_file(tmp_path)
    (tmp_path / "out").write_text("a file")
    monkeypatch.setattr(common, "launch", None)
    assert cli.main(["train", str(path)]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: output_dir: ")


def test_ctrl_c_ends_with_130(tmp_path, monkeypatch, refused):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "launch", interrupt)
    assert "interrupted" in refused(130, "train", write_run_file(tmp_path))


STUCK = """
import gc, sys, threading, time
from torch.distributed import TCPStore
from fullshard.program.cli import main as cli

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)

class Late:
    def __del__(self, set=store.set, wait=time.sleep):  # while Python ends
        set("failed", "{}")
        wait(1.0)

def main():
    print("told")
    threading.Thread(target=other.get, args=["failed"], name="RendezvousKeepAliveTimer_0", daemon=True).start()
    sys.late = late = Late()
    late.itself = late
    gc.disable()
    return 5

cli.main = main
cli.entry()
"""


def test_a_thread_that_still_waits_for_a_lost_machines_store_does_not_abort_the_process():
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (5, "told\n"), ended.stderr
