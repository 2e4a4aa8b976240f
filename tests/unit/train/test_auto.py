"""``sharding: auto`` and ``training.precision: auto``: what is chosen, on every rank, and again when a run resumes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, MemoryLimitError
from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.train import auto
from fullshard.program.train.auto import chosen_precision, chosen_settings
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.search import search
from fullshard.program.train.setup import devices as devices_module
from fullshard.program.train.setup.devices import Devices, usable
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.resume import checkpoints_directory
from fullshard.state.saving.scratch import ScratchDirectory
from support.planned import write_run
from support.tiny_run import QUICK


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("auto"), model=QUICK["model"])
    path.write_text(path.read_text() + "\nsharding: auto\n")
    return path


ROOMY = replace(auto._CPU, memory_bytes=1 << 40)


def settings(run_file, memory, monkeypatch, *overrides):
    """What two ranks choose if their machine has ``memory`` bytes left, and what they say."""
    monkeypatch.setattr(auto, "free_memory", lambda device: {"machine: here": memory})

    def load(more):
        return load_run(run_file, [*overrides, *more])

    data, said = prepare(load(())), []
    found = run_ranks(2, lambda comm: chosen_settings(load, data, comm, said.append if comm.rank == 0 else str))
    assert found[0] == found[1]
    return load(found[0]), said


def needed(run_file, *overrides):
    plan = search(lambda more: load_run(run_file, [*overrides, *more]), 2, ROOMY)
    return {one.overrides: one.plan.needed_bytes for one in plan}


def test_with_room_the_fewest_bytes_are_sent_and_the_choice_is_recorded(run_file, monkeypatch):
    config, said = settings(run_file, 1 << 40, monkeypatch)
    assert config.sharding.strategy == "no_shard"
    assert config.sharding.auto == ("sharding.strategy=no_shard",)
    assert said[0].startswith("candidate 1 of at most ")
    assert not any(" a step" in line for line in said)  # of a CPU they are no more than a guess
    assert "auto chose sharding.strategy=no_shard, of" in said[-1]


@pytest.mark.slow
def test_with_less_memory_than_that_needs_something_smaller_is_chosen(run_file, monkeypatch):
    sizes = needed(run_file)
    largest = sizes["sharding.strategy=no_shard",]
    config, _ = settings(run_file, 2 * (largest - 1), monkeypatch)  # two ranks share the machine
    assert config.sharding.auto != ("sharding.strategy=no_shard",)
    assert isinstance(config.sharding.auto, tuple)
    chosen = load_run(run_file, config.sharding.auto)
    assert chosen.sharding.strategy == config.sharding.strategy
    rows = config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps
    before = load_run(run_file).training
    assert rows == before.per_device_train_batch_size * before.gradient_accumulation_steps


@pytest.mark.slow
def test_what_an_override_sets_is_not_open(run_file, monkeypatch):
    config, _ = settings(run_file, 1 << 40, monkeypatch, "sharding.strategy=full_shard")
    assert config.sharding.strategy == "full_shard"


def test_nothing_that_fits_is_an_error_on_every_rank(run_file, monkeypatch):
    with pytest.raises(MemoryLimitError, match=r"auto found nothing that fits in 500 B a rank, of \d+ settings"):
        settings(run_file, 1000, monkeypatch)


@pytest.mark.slow
def test_a_run_that_resumes_takes_its_first_choice(run_file, tmp_path, monkeypatch):
    record = {"config": {"sharding": {"auto": ["sharding.strategy=full_shard"]}}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    config, said = settings(run_file, 1 << 40, monkeypatch, f"output_dir={tmp_path}")
    assert config.sharding.strategy == "full_shard"
    assert "keeps the choice of this run" in said[0]
    config, _ = settings(run_file, 1 << 40, monkeypatch, f"output_dir={tmp_path}", "resume=never")
    assert config.sharding.strategy == "no_shard"


def test_without_auto_nothing_is_chosen(run_file, monkeypatch):
    config, said = settings(run_file, 1000, monkeypatch, "sharding.auto=false")
    assert (config.sharding.auto, config.sharding.strategy, said) == (False, "full_shard", [])


def test_a_later_attempt_of_a_run_that_began_anew_takes_its_first_choice(run_file, tmp_path, monkeypatch):
    """Less memory is free now, and the snapshots have the first choice's shards."""
    (tmp_path / "run.json").write_text(json.dumps({"config": {"sharding": {"auto": ["sharding.strategy=no_shard"]}}}))
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    changes = [f"output_dir={tmp_path}", "resume=never"]
    ScratchDirectory.of(checkpoints_directory(load_run(run_file, changes))).mark_begun(2)
    config, said = settings(run_file, 1000, monkeypatch, *changes)
    assert config.sharding.strategy == "no_shard"
    assert "keeps the choice of this run" in said[0]


# Precision

H100, A10G = (Devices.of_sheet(hardware(name)) for name in ("h100", "a10g"))
OLD = Devices(gpu=True, bf16=False, name="Tesla V100-SXM2-32GB")


def precision(run_file, devices, *overrides, monkeypatch):
    """The settings of a run on two ranks with these devices, and what it says."""
    monkeypatch.setattr(Devices, "of_ranks", classmethod(lambda cls, comm: devices))
    said = []

    def load(more):
        return load_run(run_file, ["sharding.auto=false", *overrides, *more])

    found = run_ranks(2, lambda comm: chosen_precision(load, comm, said.append if comm.rank == 0 else str))
    assert found[0] == found[1]
    (line,), (resolved, choice) = said, found[0]
    assert f"precision: {choice.value} ({choice.why})" == line
    return load(resolved).training.precision, line


@pytest.mark.parametrize(
    ("devices", "chosen", "why"),
    [(Devices(), "fp32", "CPU"), (H100, "bf16", "h100"), (A10G, "bf16", "a10g"), (OLD, "fp32", "V100")],
)
def test_the_precision_is_bf16_where_all_gpus_compute_it(run_file, devices, chosen, why, monkeypatch):
    found, line = precision(run_file, devices, monkeypatch=monkeypatch)
    assert found == chosen
    assert line.startswith(f"precision: {chosen} (")
    assert why in line
    assert ("TF32" in line) is (devices is OLD)


def test_a_precision_that_is_set_stays_and_fp32_on_a_gpu_says_what_products_are_computed_in(run_file, monkeypatch):
    found, line = precision(run_file, H100, "training.precision=fp32", monkeypatch=monkeypatch)
    assert (found, "products in TF32" in line) == ("fp32", True)
    found, line = precision(run_file, H100, "training.precision=fp32", "training.tf32=false", monkeypatch=monkeypatch)
    assert (found, "without TF32" in line) == ("fp32", True)
    assert precision(run_file, Devices(), "training.precision=bf16", monkeypatch=monkeypatch)[0] == "bf16"


def test_one_gpu_without_bf16_among_the_ranks_decides(monkeypatch):
    def work(comm):
        comm.device = torch.device("cuda", 0)
        names = ["NVIDIA A100", "Tesla T4"]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[comm.rank])
        return Devices.of_ranks(comm)

    class Played:
        def __init__(self, device):
            pass

        def supports_bf16(self):
            return torch.cuda.get_device_name(None) == "NVIDIA A100", ""

        def supports_fp8(self):
            return False

    monkeypatch.setattr(devices_module, "device_of", Played)
    found = run_ranks(2, work)
    assert found[0] == found[1] == Devices(gpu=True, bf16=False, name="Tesla T4")


def test_one_gpu_without_bf16_of_this_machine_decides(monkeypatch):
    names = ["NVIDIA A100", "Tesla T4"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    natives = {"cuda:0": (True, ""), "cuda:1": (False, "")}
    monkeypatch.setattr(
        devices_module,
        "device_of",
        lambda device: SimpleNamespace(supports_bf16=lambda: natives[str(device)], supports_fp8=lambda: False),
    )
    assert Devices.of_machine(2) == Devices(gpu=True, bf16=False, name="Tesla T4")
    assert Devices.of_machine(1) == Devices(gpu=True, bf16=True, name="NVIDIA A100")
    assert Devices.of_machine(0) == Devices()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_run_that_continues_keeps_its_precision(run_file, tmp_path, by_name, monkeypatch):
    index = {"training.precision": "bf16"}
    place = tmp_path / "checkpoints" / "step-3"
    monkeypatch.setattr(auto, "find_checkpoints", lambda directory: [] if directory == place else [place])
    monkeypatch.setattr(auto, "read_index", lambda path: SimpleNamespace(values={"settings": index}))
    resume = [f"resume={place}"] if by_name else []
    found, line = precision(run_file, Devices(), f"output_dir={tmp_path}", *resume, monkeypatch=monkeypatch)
    assert found == "bf16"
    assert "at this run's start" in line
    assert precision(run_file, Devices(), "resume=never", monkeypatch=monkeypatch)[0] == "fp32"


@pytest.mark.parametrize("by_name", [False, True])
def test_what_was_decided_is_read_from_the_checkpoint_without_the_record_beside_it(
    run_file, tmp_path, by_name, monkeypatch
):
    place = tmp_path / "elsewhere" / "step-3"
    (tmp_path / "run.json").write_text(json.dumps({"config": {"training": {"gradient_checkpointing": 1}}}))
    decided = {"training.gradient_checkpointing": 2, "training.accumulate": "unsharded"}
    monkeypatch.setattr(auto, "find_checkpoints", lambda directory: [] if directory == place else [place])
    monkeypatch.setattr(auto, "read_index", lambda path: SimpleNamespace(values={"decided": decided}))
    asks = [f"{setting}=auto" for setting in decided] + ["training.gradient_accumulation_steps=2"]
    resume = [f"resume={place}"] if by_name else []
    config = load_run(run_file, [f"output_dir={tmp_path}", "sharding.auto=false", *asks, *resume])
    (found,) = run_ranks(1, lambda comm: auto.choices_without_plan(config, comm))
    assert [(one.setting, one.value) for one in found] == [(key, str(value)) for key, value in decided.items()]


def test_previous_keeps_the_precision_of_the_checkpoint_before_a_damaged_one(run_file, tmp_path, monkeypatch):
    places = [tmp_path / "checkpoints" / name for name in ("step-3", "step-6")]

    def read(path):
        if path == places[1]:
            raise CheckpointError("damaged")
        return SimpleNamespace(values={"settings": {"training.precision": "bf16"}})

    monkeypatch.setattr(auto, "find_checkpoints", lambda directory: places)
    monkeypatch.setattr(auto, "read_index", read)
    resume = [f"output_dir={tmp_path}", "resume=previous"]
    assert precision(run_file, Devices(), *resume, monkeypatch=monkeypatch)[0] == "bf16"
    assert precision(run_file, Devices(), f"output_dir={tmp_path}", monkeypatch=monkeypatch)[0] == "fp32"


@pytest.mark.parametrize("resume", ["resume=s3://bucket", "training.checkpoints_to=s3://bucket/of/run"])
def test_a_place_that_cannot_be_used_is_the_same_error_on_every_rank(run_file, resume, monkeypatch):
    def unusable(place):
        raise ConfigError(f"{place} is no place")

    monkeypatch.setattr(auto, "as_place", unusable)
    monkeypatch.setattr(auto, "checkpoints_directory", lambda config: unusable(config.training.checkpoints_to))
    errors = []

    def work(comm):
        try:
            chosen_precision(lambda more: load_run(run_file, ["sharding.auto=false", resume, *more]), comm)
        except ConfigError as error:
            errors.append(str(error))

    run_ranks(2, work)
    assert errors == [f"{resume.partition('=')[2]} is no place"] * 2


def test_a_plan_takes_the_precision_of_its_device(run_file):
    config = load_run(run_file, ["sharding.auto=false"])
    data = prepare(config)
    explicit = load_run(run_file, ["sharding.auto=false", "training.precision=bf16"])
    found = [plan_prepared(one, data, 2, hardware("h100"), roughly=0).parts for one in (config, explicit)]
    assert found[0] == found[1]
    on_cpus = plan_prepared(config, data, 2, roughly=0).parts
    assert on_cpus["gathered_units"] == 2 * found[0]["gathered_units"]


@pytest.mark.parametrize(("devices", "used"), [(OLD, "fp32"), (H100, "bf16"), (Devices(), "bf16")])
def test_a_model_trained_in_bf16_is_used_on_a_gpu_without_it(run_file, devices, used):
    config, notes = usable(load_run(run_file, ["training.precision=bf16"]), devices)
    assert config.training.precision == used
    assert any("V100" in note for note in notes) is (devices is OLD)
