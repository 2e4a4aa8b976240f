"""The settings that differ from the schema's defaults."""

from fullshard.program.config import RunConfig, changed_settings
from support.tiny_run import settings


def test_what_a_run_file_does_not_name_has_not_changed(tmp_path):
    """Independent of the schema: the run file's own keys."""
    values = settings(tmp_path, model={"path": "my-t5", "adapter": {"type": "lora", "r": 4}})
    values["training"]["weight_decay"] = RunConfig.model_validate(values).training.weight_decay  # the default
    found = changed_settings(RunConfig.model_validate(values).as_plain())
    named = {"output_dir", "seed", "nproc", "model.path", "model.adapter.type", "model.adapter.r"}
    named |= {f"{section}.{key}" for section in ("data", "training", "evaluation") for key in values[section]}
    assert set(found) <= named - {"training.weight_decay"}
    assert {"model.path", "model.adapter.r", "training.learning_rate", "data.max_source_length", "nproc"} <= set(found)


def test_a_key_of_another_version_is_shown_unless_it_is_empty():
    found = changed_settings({"training": {"bygone": 3, "empty": None, "learning_rate": 5e-5}})
    assert found["training.bygone"] == 3
    assert "training.empty" not in found
