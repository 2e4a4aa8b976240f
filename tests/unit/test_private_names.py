"""A private name of another library that is gone: what needs it fails, with the name and the version."""

import importlib.metadata

import accelerate
import pytest
import transformers
from accelerate.state import PartialState

from fullshard.compat.accelerate import private
from fullshard.core.transformers_private import TRAINER_METHODS, attention_of, attentions, class_of
from fullshard.errors import ConfigError


class WithoutNames:
    """Stands for a class of a later version."""


@pytest.mark.parametrize(
    ("library", "owner", "name", "use"),
    [
        ("accelerate", PartialState, "_shared_state", private.shared_states),
        ("accelerate", PartialState, "_reset_state", private.forget_ranks),
        ("transformers", WithoutNames, "_model_mapping", lambda: class_of(WithoutNames, None)),
    ],
)
def test_what_needs_a_missing_name_fails_with_the_name_and_the_version(monkeypatch, library, owner, name, use):
    monkeypatch.delattr(owner, name, raising=False)
    with pytest.raises(ConfigError) as error:
        use()
    for part in (f"{owner.__name__}.{name}", f"version {importlib.metadata.version(library)}"):
        assert part in str(error.value)


def test_the_installed_versions_have_every_name():
    assert all(hasattr(transformers.Trainer, name) for name in TRAINER_METHODS)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=8)
    model = transformers.T5ForConditionalGeneration(config)
    assert class_of(transformers.AutoModelForSeq2SeqLM, config) is type(model)
    assert "sdpa" in attentions(transformers.LlamaForCausalLM)
    assert attention_of(model.config) in ("sdpa", "eager")
    for name in ("_init_weights", "_no_split_modules", "_keys_to_ignore_on_load_missing"):
        assert hasattr(model, name)
    assert hasattr(model, "_keys_to_ignore_on_load_unexpected")
    kept = private.prepared_by(accelerate.Accelerator(cpu=True))
    assert kept.models == kept.optimizers == []
