"""A finished run, and a fake Hub that this process talks to."""

import shutil

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http, close_session

from fullshard.program.config import RunConfig
from support.alone import finish
from support.fake_hub import TOKEN, fake_hub
from support.tiny_run import settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a tiny T5, which has a card; not to be changed."""
    directory = tmp_path_factory.mktemp("run")
    config = RunConfig.model_validate(settings(directory, training__max_steps=2, card={"data_license": "cc-by-4.0"}))
    finish(config)
    return directory / "out"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may change."""
    shutil.copytree(trained, tmp_path / "mine")
    return tmp_path / "mine"


class Clock:
    """The library's time: waiting for another try takes none."""

    @staticmethod
    def sleep(seconds):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake Hub that huggingface_hub in this process talks to, with a token of its own."""
    with fake_hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        monkeypatch.setattr(_http, "time", Clock)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        close_session()
        yield found
        close_session()
