"""``fullshard train`` with ``training.push_to_hub``, on one rank and on two: rank 0 uploads."""

import subprocess
import sys

import pytest

from support.fake_hub import TOKEN, environment, fake_hub
from support.processes import environment as of_ranks
from support.tiny_run import write_run_file

pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_is_uploaded_and_a_failure_is_only_said(ranks, tmp_path):
    path = write_run_file(tmp_path, training__max_steps=2, training__push_to_hub="ada/mine", nproc=ranks)
    command = [sys.executable, "-m", "fullshard", "train", str(path), "--no-plan"]

    def call(hub, *more):
        variables = of_ranks(**environment(hub, tmp_path / "home"))
        variables.pop("RANK", None)
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done.stderr

    out = tmp_path / "out"
    with fake_hub() as hub:
        said = call(hub)
        assert said.count("model uploaded to") == 1
        assert len(hub.repositories["ada/mine"].commits) == 2
        assert hub.files("ada/mine")["model.safetensors"] == (out / "model.safetensors").read_bytes()
        hub.before = lambda request, count: request.reply(403, {"error": "no"}) or True
        said = call(hub, "resume=never")
    last = said.strip().splitlines()[-1]
    assert last == f"fullshard: the run is complete; to upload it: fullshard share {out} --repo ada/mine"
    assert "Traceback" not in said
    assert (out / "checkpoints" / "finished.json").exists()
    written = [file for file in tmp_path.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]
    assert written == []
