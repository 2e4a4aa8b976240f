"""``fullshard share`` killed at any request, or in the middle of a file: the repository is old or complete."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from fullshard.program.config import RunConfig
from support.fake_hub import Repository, environment, fake_hub
from support.processes import environment as of_ranks
from support.tiny_run import settings

pytestmark = pytest.mark.dist

REPO = "ada/mine"
OLD = {"config.json": b'{"old": 1}', "model.safetensors": b"old weights", "model-00001-of-00002.safetensors": b"older"}
POINTS = 50


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a finished run leaves as far as it is published: four files of weights, of which each is sent for itself."""
    directory = tmp_path_factory.mktemp("run")
    config = RunConfig.model_validate(settings(directory))
    out = directory / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "finished.json").write_text("{}")
    (out / "summary.json").write_text(json.dumps({"config": config.as_plain()}))
    (out / "config.json").write_text("{}")
    (out / "tokenizer.json").write_text("{}")
    (out / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    generator = torch.Generator().manual_seed(1)
    for place in range(1, 5):
        tensor = torch.randn(75_000, generator=generator)
        save_file({f"t{place}": tensor}, out / f"model-{place:05d}-of-00004.safetensors")
    (out / "model.safetensors.index.json").write_text("{}")
    return out


# Forked from a process that has imported everything: fifty starts of Python would take minutes.
SERVER = """
import os, sys
import fullshard.program.sharing, fullshard.program.cli.main as cli
for line in sys.stdin:
    run, *more = line.split()
    child = os.fork()
    if not child:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        code = 99
        try:
            code = cli.main(["share", run, "--repo", "ada/mine", *more])
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Sharer:
    """A process that runs the command in children of its own, which can be killed."""

    def __init__(self, hub, home):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=of_ranks(**environment(hub, home)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.child = 0

    def share(self, run):
        """The exit code of the command; negative: the signal that killed it."""
        self._process.stdin.write(f"{run}\n")
        self._process.stdin.flush()
        self.child = int(self._process.stdout.readline())
        return int(self._process.stdout.readline())

    def kill(self):
        os.kill(self.child, signal.SIGKILL)

    def close(self):
        self._process.communicate()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with fake_hub() as hub:
        sharer = Sharer(hub, tmp_path_factory.mktemp("home"))
        yield hub, sharer
        sharer.close()


def reset(hub, *, exists):
    hub.before, hub.part = (lambda request, count: False), (lambda received, total: None)
    hub.repositories.clear()
    hub.objects.clear()
    hub.requests.clear()
    hub.sent.clear()
    if exists:
        hub.repositories[REPO] = Repository(private=False)
        hub.repositories[REPO].commits.append(("1" * 40, {**hub.repositories[REPO].files, **OLD}))


def complete(run):
    names = [path.name for path in run.iterdir() if path.is_file() and path.name != "summary.json"]
    return {name: (run / name).read_bytes() for name in names}


def check(run, hub, sharer, *, exists, arm):
    """Kill the command where ``arm`` says, look at the repository, run the command again."""
    reset(hub, exists=exists)
    killed = []

    def kill():
        if not killed:
            killed.append(True)
            sharer.kill()

    arm(kill)
    code = sharer.share(run)
    new, old = complete(run), OLD if exists else {}
    assert code == (-signal.SIGKILL if killed else 0)
    assert (hub.files(REPO) or {}) in ((old, new) if killed else (new,))
    hub.before, hub.part = (lambda request, count: False), (lambda received, total: None)
    before = set(hub.objects)
    hub.sent.clear()
    assert sharer.share(run) == 0
    assert hub.files(REPO) == new
    assert not before & set(hub.sent), "a file that had arrived was sent again"
    return bool(killed)


def at_request(hub, number, *, answered):
    """Arms a kill at a request: before it is looked at, or when its effect is there and its answer is not."""

    def arm(kill):
        def before(request, count):
            if count == number:
                if answered:
                    request.reply = lambda *args, **more: (kill(), request.cut())
                else:
                    kill()
                    request.cut()
                    return True
            return False

        hub.before = before

    return arm


def in_a_body(hub, part):
    """Arms a kill when this many parts of bodies have arrived."""

    def arm(kill):
        seen = []

        def received(done, total):
            seen.append(done)
            if len(seen) == part:
                kill()

        hub.part = received

    return arm


def points(hub, run, sharer):
    """All points: each request of an upload to an existing and to a new repository, twice; and parts of bodies."""
    found = []
    for exists in (True, False):
        reset(hub, exists=exists)
        assert sharer.share(run) == 0
        for number in range(1, len(hub.requests) + 1):
            found += [(exists, at_request(hub, number, answered=answered)) for answered in (False, True)]
    parts = []
    reset(hub, exists=True)
    hub.part = lambda done, total: parts.append(done)
    assert sharer.share(run) == 0
    found += [(place % 2 == 0, in_a_body(hub, place)) for place in range(1, len(parts))]
    return found


def kill_at(run, place, wanted):
    hub, sharer = place
    found = points(hub, run, sharer)
    assert len(found) >= wanted
    chosen = [found[index * len(found) // wanted] for index in range(wanted)]
    killed = [check(run, hub, sharer, exists=exists, arm=arm) for exists, arm in chosen]
    assert sum(killed) >= 0.9 * wanted, "requests of several threads differ in order, but few runs end before the kill"


@pytest.mark.slow
def test_killed_at_five_points(run, place):
    kill_at(run, place, 5)


@pytest.mark.slow
def test_killed_at_fifty_points(run, place):
    kill_at(run, place, POINTS)


@pytest.mark.slow
def test_a_cut_upload_is_not_sent_from_the_start(run, place):
    """Killed in the fourth of four files: the second command sends no more than what is missing."""
    hub, sharer = place
    reset(hub, exists=False)

    def third(request, count):
        if "/commit/" in request.path:
            sharer.kill()
            request.cut()
            return True
        return False

    hub.before = third
    assert sharer.share(run) == -signal.SIGKILL
    assert len(hub.sent) == 4
    assert hub.files(REPO) == {}
    hub.before = lambda request, count: False
    shutil.copytree(run, run.parent / "copy")
    assert sharer.share(run.parent / "copy") == 0
    assert len(hub.sent) == 4
