"""What cannot be split is refused with the numbers, on every rank; calls without labels compute full rows."""

import copy
import re

import pytest
import torch
from transformers import BartForCausalLM, BertConfig, BertForMaskedLM, OPTConfig, OPTForCausalLM, T5EncoderModel

from fullshard import ShardingStrategy, fully_shard, sequence_parallel
from fullshard.compat.torch_fsdp import FullyShardedDataParallel, fully_shard as torchs_fully_shard
from fullshard.core.comm import SoloComm
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, MismatchError, ModelError, ProcessGroupError, ShardingError, UserError
from support.models import bart, llama, t5, tiny_t5_config
from support.shared_rows import VOCAB, padded

OPT = {"vocab_size": 40, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1}
OPT |= {"num_attention_heads": 4}
ALONE = SoloComm(torch.device("cpu"))


def batch(**lengths):
    return padded(torch.Generator().manual_seed(0), seq2seq=True, **lengths)


def raised_by(work, ranks=2):
    """What each rank raised."""

    def caught(comm):
        with pytest.raises(UserError) as error:
            work(comm)
        return type(error.value), str(error.value)

    return run_ranks(ranks, caught)


def bert():
    return BertForMaskedLM(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=40))


def as_flash():
    model = llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (bert, ModelError, ["BertForMaskedLM of type bert"]),
        (lambda: T5EncoderModel(tiny_t5_config()), ModelError, ["T5EncoderModel of type t5"]),
        (lambda: torch.nn.Linear(2, 2), ModelError, ["got Linear."]),
        (lambda: fully_shard(llama(), ALONE), ShardingError, ["before fully_shard"]),
        (lambda: sequence_parallel(llama(), ALONE), ShardingError, ["once"]),
        (as_flash, ModelError, ["sdpa or eager", "flash_attention_2"]),
        (lambda: bart(encoder_layerdrop=0.1), ConfigError, ["encoder_layerdrop: 0.1"]),
        (lambda: OPTForCausalLM(OPTConfig(**OPT, layerdrop=0.1)), ConfigError, ["layerdrop: 0.1"]),
        (lambda: BartForCausalLM(bart().config), ModelError, ["type bart", "BartForCausalLM is a decoder"]),
    ],
)
def test_models_that_cannot_share_rows_are_refused(make, error, parts):
    with pytest.raises(error) as refused:
        sequence_parallel(make(), ALONE)
    assert all(part in str(refused.value) for part in parts)


def test_more_ranks_than_heads_are_refused_with_the_numbers():
    models = [llama(num_attention_heads=2) for _ in range(3)]
    for kind, text in raised_by(lambda comm: sequence_parallel(models[comm.rank], comm), ranks=3):
        assert kind is ConfigError
        assert "has 2 for 3 ranks" in text


def test_a_mesh_of_two_axes_is_refused():
    def work(comm):
        sequence_parallel(llama(), (comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])))

    assert {kind for kind, _ in raised_by(work, ranks=4)} == {ProcessGroupError}


class Wrapper(torch.nn.Module):
    """A model two modules deep."""

    def __init__(self, model):
        super().__init__()
        self.inside = torch.nn.ModuleDict({"model": model})


PARTS = {
    "model": lambda model, mesh: fully_shard(model, mesh),
    "decoder": lambda model, mesh: fully_shard(model.model, mesh),
    "block": lambda model, mesh: fully_shard(model.model.layers[1], mesh),
    "projection": lambda model, mesh: fully_shard(model.model.layers[0].self_attn.q_proj, mesh),
    "head": lambda model, mesh: fully_shard(model.lm_head, mesh),
    "several": lambda model, mesh: fully_shard([model.model.norm, model.lm_head], mesh),
    "wrapper": lambda model, mesh: fully_shard(Wrapper(model), mesh),
    "copy": lambda model, mesh: fully_shard(copy.deepcopy(model).model, mesh),
    "FSDP1": lambda model, mesh: FullyShardedDataParallel(model.model, mesh),
    "FSDP2": lambda model, mesh: torchs_fully_shard(model.model, mesh=mesh),
    "replicas": lambda model, mesh: fully_shard(model.model, mesh, strategy=ShardingStrategy.NO_SHARD),
}


@pytest.mark.parametrize("part", PARTS)
def test_fully_shard_over_ranks_without_the_group_is_refused(part):
    models = [llama() for _ in range(4)]

    def work(comm):
        rows, others = comm.split([[0, 1], [2, 3]]), comm.split([[0, 2], [1, 3]])
        PARTS[part](sequence_parallel(models[comm.rank], rows), others)

    for kind, text in raised_by(work, ranks=4):
        assert issubclass(kind, ProcessGroupError)
        assert re.search(r"Groups of 2 ranks share the rows of \w+, and of the 2 ranks of fully_shard ", text)


def test_a_part_over_all_ranks_is_sharded():
    model = llama()
    models = [copy.deepcopy(model) for _ in range(4)]

    def work(comm):
        model = sequence_parallel(models[comm.rank], comm.split([[0, 1], [2, 3]]))
        fully_shard(model.model, comm)
        return not hasattr(model.lm_head.weight, "shard_meta") and hasattr(model.model.norm.weight, "shard_meta")

    assert all(run_ranks(4, work))


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        ([[0, 1], [2]], ["a group of 2", "a group of 1"]),
        ([[0, 1, 2], [3]], ["a group of 3", "a group of 1"]),
        ([[0, 1], [2, 3], [4]], ["a group of 2", "a group of 1"]),
        ([[0, 1], None], ["a group of 2", "rank 2 has rows of its own"]),
        ([[0, 1], [1, 2]], ["Groups of 2 ranks", "those of rank 2 lack some"]),
        ([[0, 1], [1, 2], [2, 3]], ["Groups of 2 ranks", "those of rank 2, 3 lack some"]),
    ],
    ids=["2 + 1", "3 + 1", "2 + 2 + 1", "in none", "overlapping", "another on each rank"],
)
def test_groups_that_are_not_complete_and_of_one_size_are_refused_on_every_rank(groups, shown):
    ranks = 1 + max(rank for group in groups if group for rank in group) + (None in groups)
    models = [llama() for _ in range(ranks)]

    def work(comm):
        model = models[comm.rank]
        if any(group and comm.rank in group for group in groups):
            sequence_parallel(model, comm.split([group for group in groups if group]))
        fully_shard(model, comm)

    texts = {text for _, text in raised_by(work, ranks)}
    assert len(texts) == 1
    assert all(part in text for text in texts for part in shown), texts


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"labels": None}, "pass labels in training"),
        ({"output_attentions": True}, "output_attentions"),
        ({"past_key_values": ()}, "past_key_values"),
        ({"ignore_index": 0}, "another ignore_index"),
        ({"decoder_input_ids": torch.ones(2, 9, dtype=torch.int64)}, "7 labels a row for 9 tokens"),
    ],
)
def test_calls_that_cannot_be_split_are_refused(change, part):
    model = sequence_parallel(t5().train(), ALONE)
    with pytest.raises(ShardingError, match=part):
        model(**(batch() | change))


def test_what_the_model_sets_for_all_calls_is_refused_too():
    model = sequence_parallel(t5(), ALONE)
    model.config.output_hidden_states = True
    with pytest.raises(ShardingError, match="output_hidden_states"):
        model(**batch())
    model.config.output_hidden_states, model.loss_function = False, torch.nn.functional.cross_entropy
    with pytest.raises(ShardingError, match="loss_function of its own"):
        model(**batch())


def test_rows_of_fewer_tokens_than_ranks_are_refused_on_every_rank():
    models = [t5() for _ in range(4)]
    for kind, text in raised_by(lambda comm: sequence_parallel(models[comm.rank], comm)(**batch(target=3)), ranks=4):
        assert kind is ShardingError
        assert "4 tokens; those of the decoder have 3" in text


@pytest.mark.parametrize("name", ["input_ids", "labels"])
@pytest.mark.parametrize("change", [lambda ids: ids + 1, lambda ids: ids[:, :-1]])
def test_ranks_that_were_given_other_rows_raise_the_same_error(name, change):
    models = [t5() for _ in range(2)]

    def work(comm):
        mine = batch()
        if comm.rank:
            mine[name] = change(mine[name])
        sequence_parallel(models[comm.rank], comm)(**mine)

    kinds, texts = zip(*raised_by(work), strict=True)
    assert set(kinds) == {MismatchError}
    assert len(set(texts)) == 1
    assert f"{name} of rank 1" in texts[0]


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_ranks_that_counted_other_labels_raise_the_same_error(kind):
    models = [llama() for _ in range(2)]
    ids = torch.arange(3, 9)[None]

    def work(comm):
        mine = {"input_ids": ids, "labels": ids, "num_items_in_batch": kind(6 + comm.rank)}
        sequence_parallel(models[comm.rank], comm)(**mine)

    kinds, texts = zip(*raised_by(work), strict=True)
    assert set(kinds) == {MismatchError}
    assert len(set(texts)) == 1
    assert "num_items_in_batch of rank 1" in texts[0]


def test_gradients_of_gradients_are_refused():
    model = sequence_parallel(llama(), ALONE)
    ids = torch.arange(3, 9)[None]
    weight = model.model.embed_tokens.weight
    (gradient,) = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("make", [t5, llama])
def test_calls_without_labels_and_generation_are_those_of_the_plain_model(make):
    torch.manual_seed(0)
    plain = make().eval()
    models = [copy.deepcopy(plain) for _ in range(2)]
    ids = torch.randint(3, 40, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :3]} if plain.config.is_encoder_decoder else {})

    def outputs(model):
        with torch.no_grad():
            return model(**inputs).logits, model.generate(ids, max_new_tokens=4, do_sample=False)

    def work(comm):
        return outputs(sequence_parallel(models[comm.rank], comm))

    logits, tokens = outputs(plain)
    for own_logits, own_tokens in run_ranks(2, work):
        assert torch.equal(own_tokens, tokens)
        torch.testing.assert_close(own_logits, logits)


def test_outputs_are_of_this_ranks_tokens_and_the_config_stays_loadable(tmp_path):
    models = [t5() for _ in range(2)]

    def work(comm):
        output = sequence_parallel(models[comm.rank], comm)(**batch(), return_dict=False)
        return output[0].shape, output[1].shape

    assert [tuple(map(tuple, shapes)) for shapes in run_ranks(2, work)] == [((), (2, 4, VOCAB)), ((), (2, 3, VOCAB))]
    models[0].config.save_pretrained(tmp_path)
    assert "heads_of" not in (tmp_path / "config.json").read_text()
