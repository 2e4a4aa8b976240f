"""generate() of a sharded model: each rank its own rows and lengths, without an argument."""

import copy

import pytest
import torch

from fullshard import ShardingStrategy, fully_shard, unsharded
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError
from support.models import TinyLM, bart, batches, gpt2, lm_loss, t5
from support.parity import assert_gradients, on_ranks, replicas, sharded_gradients, two_by_two

SIZE = 3
LENGTHS = (2, 9, 5)


def prompts():
    return batches(1, SIZE, seed=3)[0]


def written(model, prompt, length, **options):
    return model.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False, **options)


@pytest.mark.parametrize(("make", "beams"), [(t5, 1), (bart, 2), (gpt2, 1), (gpt2, 2)])
def test_ranks_that_end_at_different_lengths_write_what_the_unsharded_model_does(make, beams):
    reference, models = replicas(make, SIZE)
    reference.eval()
    expected = [written(reference, prompts()[[r]], LENGTHS[r], num_beams=beams) for r in range(SIZE)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm).eval()
        first = written(model, prompts()[[comm.rank]], LENGTHS[comm.rank], num_beams=beams)
        again = written(model, prompts()[[comm.rank]], LENGTHS[comm.rank], num_beams=beams)
        return first, again, model._fullshard_runtime.tracker.live["gathered"]

    for rank, (first, again, gathered) in enumerate(run_ranks(SIZE, work)):
        assert torch.equal(first, expected[rank])
        assert torch.equal(again, expected[rank])
        assert gathered == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_model_inside_an_adapter_writes_in_lockstep():
    peft = pytest.importorskip("peft")
    reference, models = replicas(t5, SIZE)
    adapted = peft.get_peft_model(models[0], peft.LoraConfig(target_modules=["q"], r=2))
    models = [copy.deepcopy(adapted) for _ in range(SIZE)]
    expected = [written(reference.eval(), prompts()[[r]], LENGTHS[r]) for r in range(SIZE)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm).eval()
        length = LENGTHS[comm.rank]
        options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        return model.generate(input_ids=prompts()[[comm.rank]], **options)

    for rank, ids in enumerate(run_ranks(SIZE, work)):
        assert torch.equal(ids, expected[rank])


def test_a_rank_that_generates_alone_is_told_what_the_others_do():
    def work(comm, model):
        if comm.rank == 1:
            written(model, prompts()[[1]], 2)
        else:
            model(input_ids=prompts()[[0]], labels=prompts()[[0]])

    with pytest.raises(MismatchError, match=r"rank 1.*the start of generate\(\)"):
        on_ranks(SIZE, t5, work)


def test_replicas_end_at_different_lengths_and_train_afterwards():
    reference, models = replicas(t5, 4)
    reference.eval()
    data, lengths = batches(1, 4)[0], (2, 3, 9, 5)
    expected = [written(reference, data[[r]], lengths[r]) for r in range(4)]
    reference.train()(input_ids=data, labels=data).loss.backward()

    def work(comm):
        model = fully_shard(models[comm.rank], two_by_two(comm)[::-1], strategy=ShardingStrategy.HYBRID_SHARD).eval()
        ids = written(model, data[[comm.rank]], lengths[comm.rank])
        model.train()(input_ids=data[[comm.rank]], labels=data[[comm.rank]]).loss.backward()
        return ids, sharded_gradients(model)

    run = run_ranks(4, work)
    for rank, (ids, _) in enumerate(run):
        assert torch.equal(ids, expected[rank])
    assert_gradients([gradients for _, gradients in run], reference)


@pytest.mark.parametrize("trained", [False, True])
def test_ranks_train_together_after_one_wrote_alone_inside_unsharded(trained):
    reference, models = replicas(t5, 2)
    data = batches(1, 2)[0]
    expected = written(reference.eval(), data[[1]], 4)
    reference.train()(input_ids=data, labels=data).loss.backward()

    def train(model, rank):
        model.zero_grad()
        model.train()(input_ids=data[[rank]], labels=data[[rank]]).loss.backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        if trained:
            train(model, comm.rank)
        with unsharded(model):
            if comm.rank == 1:
                assert torch.equal(written(model.eval(), data[[1]], 4), expected)
        train(model, comm.rank)
        train(model, comm.rank)
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference)


class OwnGenerate(TinyLM):
    """Writes with a loop of its own, without the names of transformers."""

    @torch.no_grad()
    def generate(self, tokens, length):
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


class OwnGenerateByName(OwnGenerate):
    """Has one name in common with transformers, and no cache."""

    def forward(self, input_ids):
        return super().forward(input_ids)

    @torch.no_grad()
    def generate(self, tokens, length):
        for _ in range(length):
            tokens = torch.cat([tokens, self(input_ids=tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


@pytest.mark.parametrize("make", [OwnGenerate, OwnGenerateByName])
def test_a_generate_of_the_users_own_runs_in_lockstep(make):
    reference, models = replicas(make, SIZE)
    expected = [reference.generate(prompts()[[r]], LENGTHS[r]) for r in range(SIZE)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        ids = model.generate(prompts()[[comm.rank]], LENGTHS[comm.rank])
        lm_loss(model, prompts()[[comm.rank]]).backward()
        return ids

    for rank, ids in enumerate(run_ranks(SIZE, work)):
        assert torch.equal(ids, expected[rank])
