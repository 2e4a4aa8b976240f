"""State dicts of FSDP1's wrapper on rank threads: full, sharded and local."""

import copy
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from fullshard.compat.torch_fsdp.api import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.core.engine import units
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, ShardingError
from fullshard.state.saving.shard_tensor import ShardTensor
from support.fsdp1 import BF16, KINDS, POLICY, on_ranks, same
from support.models import TinyLM, batches, seq2seq_loss, t5
from support.parity import replicas

FULL, SHARDED, LOCAL = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT)


@pytest.mark.parametrize(("kind", "size"), [("lm", 1), *((kind, 4) for kind in KINDS)])
def test_a_full_state_dict_is_the_plain_model_s_and_loads_into_it(kind, size):
    def work(comm, model, plain):
        state = model.state_dict()
        same(state, plain.state_dict())
        same(model.module.state_dict(), plain.state_dict())
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
        assert all(v.untyped_storage().nbytes() == v.nbytes for v in tensors)  # what is saved alone is written alone
        changed = {n: v + 1 if isinstance(v, torch.Tensor) else {"seen": 3} for n, v in plain.state_dict().items()}
        model.load_state_dict(changed)
        plain.load_state_dict(changed)
        same(model.state_dict(), plain.state_dict())
        assert not {v.data_ptr() for v in state.values() if isinstance(v, torch.Tensor)} & {
            p.data_ptr() for p in model.parameters() if p.nbytes
        }
        tokens = batches(1, 2)[0]
        torch.testing.assert_close(KINDS[kind][1](model.eval(), tokens), KINDS[kind][1](plain.eval(), tokens))

    on_ranks(kind, size, work)


class ReadWhenUsed:
    """A tensor in a file, as Lightning's: of a tensor's interface it has the shape, and torch's functions read it."""

    def __init__(self, value, read):
        self.value, self.read, self.alive = value, read, 0

    @property
    def shape(self):
        self.alive = sum(one() is not None for one in self.read)
        return self.value.shape

    @classmethod
    def __torch_function__(cls, function, _types, args=(), kwargs=None):
        values = [one.value.clone() if isinstance(one, cls) else one for one in args]
        for one, value in zip(args, values, strict=True):
            if isinstance(one, cls):
                one.read.append(weakref.ref(value))
        return function(*values, **(kwargs or {}))


def test_tensors_that_are_read_when_used_load_one_at_a_time():
    def work(comm, model, plain):
        expected, read = {name: value + 1 for name, value in plain.state_dict().items()}, []
        given = {name: ReadWhenUsed(value, read) for name, value in expected.items()}
        model.load_state_dict(given)
        same(model.state_dict(), expected)
        assert len(read) == len(given) - 1  # a tied weight has two names
        assert max(one.alive for one in given.values()) <= 1

    on_ranks("lm", 2, work)


@pytest.mark.parametrize("config", [FullStateDictConfig(), FullStateDictConfig(True, True)])
def test_after_training_a_full_state_dict_is_what_the_plain_run_has(config):
    def work(comm, model, plain):
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            seq2seq_loss(one, batches(1, 2)[0]).backward()
            optimizer.step()
        with FSDP.state_dict_type(model, FULL, config):
            state = model.state_dict()
            if config.rank0_only and comm.rank > 0:
                assert state == {}
                return
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5)

    on_ranks("t5", 3, work)


def test_under_mixed_precision_and_offload_it_is_as_kept():
    def work(comm, model, plain):
        same(model.state_dict(), plain.state_dict())
        model.load_state_dict(plain.state_dict())
        with FSDP.summon_full_params(model):
            assert model.shared.weight.dtype == torch.float32
        seq2seq_loss(model, batches(1, 2)[0]).backward()

    on_ranks("t5", 2, work, mixed_precision=BF16, cpu_offload=CPUOffload(offload_params=True))


def test_gathering_holds_one_unit_beside_the_shards():
    def work(comm, model, plain):
        seen = []
        gather = comm.all_gather

        def spy(full, shard):
            seen.append(full.numel())
            return gather(full, shard)

        comm.all_gather = spy
        with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
            model.state_dict()
        largest = max(row.parameters for row in units(model.module).rows)
        assert 0 < max(seen) < 1.1 * largest < sum(p.numel() for p in plain.parameters()) / 2

    on_ranks("t5", 2, work)


def test_a_part_gives_and_takes_its_own_names():
    def work(comm, model, plain):
        part, plain_part = model.encoder.block[1], plain.encoder.block[1]
        same(part.state_dict(), plain_part.state_dict())
        same(part.state_dict(prefix="x."), plain_part.state_dict(prefix="x."))
        part.load_state_dict({name: value * 2 for name, value in plain_part.state_dict().items()})
        doubled = plain.encoder.block[1].layer[0].layer_norm.weight * 2
        assert torch.equal(model.state_dict()["encoder.block.1.layer.0.layer_norm.weight"], doubled)

    on_ranks("t5", 2, work)


def test_a_module_around_a_model_gives_and_takes_all_names():
    _, models = replicas(TinyLM, 4)

    def work(comm):
        outer = nn.ModuleDict({"a": FSDP(models[comm.rank], comm, auto_wrap_policy=POLICY), "b": nn.Linear(2, 2)})
        plain = nn.ModuleDict({"a": models[2 + comm.rank], "b": copy.deepcopy(outer["b"])})
        same(outer.state_dict(), plain.state_dict())
        outer.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
        assert torch.equal(outer.state_dict()["a.head.weight"], plain["a"].embed.weight + 1)

    run_ranks(2, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [SHARDED, LOCAL])
def test_sharded_and_local_state_dicts_come_back(kind, chosen):
    def work(comm, model, plain):
        FSDP.set_state_dict_type(model, chosen)
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        if chosen is SHARDED:
            parts = {name: v for name, v in state.items() if isinstance(v, ShardTensor)}
            assert parts.keys() <= plain.state_dict().keys()
            for name, part in parts.items():
                flat = plain.state_dict()[name].reshape(-1)
                assert torch.equal(part.flat, flat[part.start : part.start + part.flat.numel()])
                assert part.shape == plain.state_dict()[name].shape
        state = copy.deepcopy(state) if chosen is LOCAL else state
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(state)
        FSDP.set_state_dict_type(model, FULL)
        same(model.state_dict(), plain.state_dict())

    on_ranks(kind, 4, work)


def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing():
    def work(comm, model, plain):
        good = plain.state_dict()
        texts = []
        for state, strict in (
            ({name: value for name, value in good.items() if "up" not in name}, True),
            (good | {"other": torch.zeros(1)}, True),
            (good | {"blocks.0.up.weight": torch.zeros(3, 3)}, False),
            (good | ({"blocks.0.up.weight": torch.zeros(3, 3)} if comm.rank == 1 else {}), False),
        ):
            with pytest.raises(ShardingError) as caught:
                model.load_state_dict({name: value + 1 for name, value in state.items()}, strict=strict)
            texts.append(str(caught.value))
        with pytest.raises(ShardingError, match="assign"):
            model.load_state_dict(good, assign=True)
        same(model.state_dict(), good)
        loose = model.load_state_dict({"other": torch.zeros(1), "head.weight": good["head.weight"]}, strict=False)
        assert loose.unexpected_keys == ["other"]
        assert "blocks.0.up.weight" in loose.missing_keys
        assert "embed.weight" not in loose.missing_keys
        return texts

    first, second = on_ranks("lm", 2, work)
    assert first == second
    assert "blocks.3.up.weight" in first[0]
    assert "other" in first[1]
    assert "(3, 3) where the model has (40, 24)" in first[2]


def test_the_type_is_kept_returned_and_put_back():
    def work(comm, model, plain):
        assert FSDP.get_state_dict_type(model).state_dict_type is FULL
        former = FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
        assert former.state_dict_type is FULL

        def look():
            settings = FSDP.get_state_dict_type(model)
            assert settings.state_dict_config.rank0_only
            assert settings.optim_state_dict_config == FullOptimStateDictConfig()
            raise KeyError

        with pytest.raises(KeyError), FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
            look()
        assert FSDP.get_state_dict_type(model).state_dict_config.offload_to_cpu
        for kind, config, optim in (
            (FULL, LocalStateDictConfig(), None),
            (SHARDED, None, FullOptimStateDictConfig()),
            ("full", None, None),
        ):
            with pytest.raises(ConfigError):
                FSDP.set_state_dict_type(model, kind, config, optim)
        assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED

    on_ranks("lm", 2, work)
    with pytest.raises(ShardingError, match="contains no sharded model"):
        FSDP.get_state_dict_type(TinyLM())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # peft 0.18, of the plain model too
def test_an_adapted_model_gives_its_adapter_on_every_rank(tmp_path):
    def make():
        config = LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"])
        return get_peft_model(t5(), config)

    _, models = replicas(make, 4)

    def work(comm):
        model, plain = FSDP(models[comm.rank], comm, auto_wrap_policy=POLICY), models[2 + comm.rank]
        for one in (model, plain):
            optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
            seq2seq_loss(one.eval(), batches(1, 2)[0]).backward()
            optimizer.step()
        ours, theirs = get_peft_model_state_dict(model.module), get_peft_model_state_dict(plain)
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5)
        model.module.save_pretrained(str(tmp_path / str(comm.rank)))
        assert any(p.nbytes for p in model.parameters())

    run_ranks(2, work)
    assert len({(tmp_path / str(rank) / "adapter_model.safetensors").read_bytes() for rank in range(2)}) == 1
