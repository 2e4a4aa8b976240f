"""Where a model is looked for: a directory, then the Hub's cache; and what is said when it is in neither."""

import pytest
from huggingface_hub import constants

from fullshard.errors import ModelError
from fullshard.program.models import resolve_model, stated_license

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def store(cache, *names):
    """A snapshot as the Hub's client keeps it."""
    repository = cache / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def test_a_directory_is_itself(tmp_path, cache):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_an_id_is_found_in_the_cache_without_a_network(cache, weights):
    snapshot = store(cache, "config.json", weights)
    assert resolve_model("someone/tiny") == snapshot


def test_only_what_a_model_needs_is_fetched_and_bin_only_without_safetensors(tmp_path, cache, monkeypatch):
    asked = []

    def fetch(model_id, *, allow_patterns, ignore_patterns):
        assert (model_id, ignore_patterns) == ("someone/tiny", ["*/*"])
        asked.append(any(pattern.endswith(".bin") for pattern in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("fullshard.program.models.hub.snapshot_download", fetch)
    resolve_model("someone/tiny")
    (tmp_path / "model.safetensors").touch()
    resolve_model("someone/tiny")
    assert asked == [False, True, False]


def test_what_is_nowhere_is_told_with_the_places_that_were_looked_at(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model("someone/tiny")
    text = str(caught.value)
    assert f"no directory {tmp_path}/someone/tiny" in text
    assert str(cache) in text
    assert "HF_HUB_OFFLINE is set" in text
    assert "hf download someone/tiny" in text
    with pytest.raises(ModelError, match=r"not an id of a model on the Hugging Face Hub"):
        resolve_model("./models/mine")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model("file")


@pytest.mark.parametrize(
    ("card", "stated"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: gemma\nlicense_link: https://a.b/c\n---\n", "gemma (https://a.b/c)"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("---\ntags: [t5]\n---\nlicense: mit\n", None),
        ("---\nlicense: [\n---\n", None),
        ("# A model under the MIT license\n", None),
    ],
)
def test_a_licence_is_what_the_models_card_states(card, stated, cache, tmp_path):
    snapshot = store(cache, "config.json")
    assert stated_license("someone/tiny") is None
    (snapshot / "README.md").write_text(card)
    assert stated_license("someone/tiny") == stated
    assert stated_license(str(snapshot)) == stated
    assert stated_license(str(tmp_path / "nowhere")) is None
