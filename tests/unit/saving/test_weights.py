"""Pretrained weights reach the shards to the bit, each byte read by the rank that keeps it, or nothing changes."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Model, LlamaConfig, LlamaForCausalLM

from fullshard import CPUOffload, MixedPrecision, ShardingStrategy, full_tensors, fully_shard, memory_summary, unsharded
from fullshard.core.engine.setup import initial
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, MismatchError, ShardingError
from fullshard.state.saving import Pretrained, load
from fullshard.state.storage import safetensors_file
from support.models import (
    TinyLM,
    bart,
    batches,
    causal_loss,
    gpt2,
    lm_loss,
    lm_with_frozen_parts,
    seq2seq_loss,
    t5,
    t5_untied as untied,
)
from support.parity import optimizer_for


def t5_untied():
    model = untied()
    model.config.tie_word_embeddings = False
    return model


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


MODELS = {"t5": t5, "bart": bart, "gpt2": gpt2, "t5_untied": t5_untied, "llama": llama}
FILES = ("model.safetensors", "several", "pytorch_model.bin")


def seeded(make):
    torch.manual_seed(0)
    return make()


def write(model, directory, form="model.safetensors"):
    """The model's weights as Hugging Face writes them, or wrote them."""
    if form == "several":
        model.save_pretrained(directory, max_shard_size="40KB")
        assert len(list(directory.glob("*.safetensors"))) > 2
    elif form == "pytorch_model.bin":
        directory.mkdir(exist_ok=True)
        torch.save(model.state_dict(), directory / form)
    else:
        model.save_pretrained(directory)
    return directory


def stored_bytes(directory):
    return sum(t.nbytes for path in directory.glob("*.safetensors") for t in load_file(path).values())


def skeletons(make, count):
    """Models without memory, one for each rank."""
    with torch.device("meta"):
        return [make() for _ in range(count)]


def whole(model):
    with unsharded(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    differing = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not differing


def sharded_by_ranks(models, path, **options):
    """Shard each rank's model with the weights at ``path``: whole state and bytes read, by rank."""

    def work(comm):
        source = Pretrained(path)
        model = fully_shard(models[comm.rank], comm, weights=source, **options)
        return whole(model), source.bytes_read

    return run_ranks(len(models), work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_every_model_and_world_gets_the_bits_and_reads_each_byte_once(kind, size, tmp_path):
    reference = seeded(MODELS[kind])
    write(reference, tmp_path)
    results = sharded_by_ranks(skeletons(MODELS[kind], size), tmp_path)
    for state, _ in results:
        same(state, reference.state_dict())
    buffers = sum(buffer.nbytes for buffer in reference.buffers()) if kind == "bart" else 0  # each rank keeps its own
    assert sum(count for _, count in results) == stored_bytes(tmp_path) + (size - 1) * buffers


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_every_form_of_file_gives_what_from_pretrained_gives(kind, form, tmp_path):
    reference = seeded(MODELS[kind])
    reference.config.save_pretrained(tmp_path)
    write(reference, tmp_path, form)
    theirs = type(reference).from_pretrained(tmp_path).state_dict()
    for state, _ in sharded_by_ranks(skeletons(MODELS[kind], 2), tmp_path):
        same(state, theirs)


@pytest.mark.parametrize(("make", "loss_of"), [(t5, seq2seq_loss), (llama, causal_loss)])
def test_a_model_filled_by_shard_trains_as_the_unsharded_one(make, loss_of, tmp_path):
    """Also with rotary tables, which no file holds and Llama computes."""
    reference = seeded(make)
    write(reference, tmp_path)
    models = skeletons(make, 2)
    tokens = batches(1, 2)[0]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, weights=Pretrained(tmp_path))
        loss = loss_of(model, tokens)
        loss.backward()
        return loss.item()

    expected = loss_of(reference, tokens).item()
    assert run_ranks(2, work) == pytest.approx([expected, expected], abs=1e-6)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_no_parameter_is_initialised_and_nothing_is_gathered(kind, tmp_path, monkeypatch):
    write(seeded(MODELS[kind]), tmp_path)
    models = skeletons(MODELS[kind], 2)
    monkeypatch.setattr(initial.Initializer, "prepare_unit", None)
    real = []
    for model in models:
        init = model._init_weights

        def noted(module, init=init):
            real.extend(p for p in module.parameters(recurse=False) if not p.is_meta)
            init(module)

        monkeypatch.setattr(model, "_init_weights", noted)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, weights=Pretrained(tmp_path))
        return memory_summary(model)["gathered_peak"], {u.state.name for u in model._fullshard_runtime.units}

    units = run_ranks(2, work)
    assert not real
    assert [states for _, states in units] == [{"SHARDED"}] * 2


class Scaled(nn.Module):
    """A parameter and a computed buffer in one module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.tensor(4))
        self.when = []

    def reset_parameters(self):
        self.when.append(self.weight.is_meta)
        nn.init.ones_(self.weight)
        self.table.copy_(torch.arange(3.0))


def test_a_module_computes_its_buffers_while_its_parameters_have_no_memory(tmp_path):
    weight = torch.arange(15.0).view(5, 3)
    save_file({"weight": weight, "count": torch.tensor(7)}, tmp_path / "x.safetensors")
    models = skeletons(Scaled, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None, weights=Pretrained(tmp_path / "x.safetensors"))
        assert model.when == [True]
        assert model.table.tolist() == [0, 1, 2]
        return whole(model)

    for state in run_ranks(2, work):
        same(state, {"weight": weight, "count": torch.tensor(7)})


@pytest.mark.parametrize(("stored", "kept"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float64", "float16")])
def test_dtypes_are_converted_on_the_way(stored, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "STAGING_BYTES", 1024)
    reference = seeded(t5)
    write(copy.deepcopy(reference).to(getattr(torch, stored)), tmp_path)
    expected = {k: v.to(getattr(torch, stored)).to(getattr(torch, kept)) for k, v in reference.state_dict().items()}
    with torch.device("meta"):
        models = [t5().to(getattr(torch, kept)) for _ in range(2)]
    for state, _ in sharded_by_ranks(models, tmp_path):
        same(state, expected)


OPTIONS = {
    "no_shard": {"strategy": ShardingStrategy.NO_SHARD},
    "one_unit": {"wrap": None},
    "bf16": {"mp_policy": MixedPrecision(param="bfloat16", reduce="float32")},
    "offload": {"offload_policy": CPUOffload(pin_memory=False)},
    "replicated": {"frozen": "replicate"},
    "frozen_bf16": {"mp_policy": MixedPrecision(param="bfloat16", reduce="float32"), "frozen": "replicate"},
}


def frozen_encoder():
    model = t5()
    model.encoder.block.requires_grad_(False)
    return model


@pytest.mark.parametrize("options", OPTIONS)
def test_every_placement_is_filled_as_one_that_is_cut_from_a_whole_model(options, tmp_path):
    reference = seeded(frozen_encoder)
    write(reference, tmp_path)
    models, cut = skeletons(frozen_encoder, 2), [copy.deepcopy(reference) for _ in range(2)]

    def work(comm):
        filled = fully_shard(models[comm.rank], comm, weights=Pretrained(tmp_path), **OPTIONS[options])
        expected = fully_shard(cut[comm.rank], comm, **OPTIONS[options])
        return [
            (p.shard_meta.name, p.requires_grad, torch.equal(p, q), p.dtype == q.dtype)
            for p, q in zip(filled.parameters(), expected.parameters(), strict=True)
        ]

    for rank in run_ranks(2, work):
        assert all(equal and same_dtype for _, _, equal, same_dtype in rank)
        assert {trainable for _, trainable, _, _ in rank} == {True, False}


def test_replicas_of_a_hybrid_mesh_are_filled_alike(tmp_path):
    reference = seeded(t5)
    write(reference, tmp_path)
    models = skeletons(t5, 4)

    def work(comm):
        source = Pretrained(tmp_path)
        mesh = comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])
        model = fully_shard(models[comm.rank], mesh, strategy=ShardingStrategy.HYBRID_SHARD, weights=source)
        return whole(model), source.bytes_read

    replicas = run_ranks(4, work)
    for state, _ in replicas:
        same(state, reference.state_dict())
    assert sum(count for _, count in replicas) == 2 * stored_bytes(tmp_path)


def test_values_that_the_model_has_are_replaced_and_may_differ_between_ranks(tmp_path):
    reference = seeded(gpt2)
    write(reference, tmp_path)
    models = [gpt2() for _ in range(2)]
    for state, _ in sharded_by_ranks(models, tmp_path):
        same(state, reference.state_dict())


# Names


def renamed(directory, rename):
    tensors = load_file(directory / "model.safetensors")
    save_file({rename(name): value for name, value in tensors.items()}, directory / "model.safetensors")


def test_the_base_models_prefix_may_be_missing_or_too_much(tmp_path):
    reference = seeded(gpt2)
    write(reference, tmp_path)
    renamed(tmp_path, lambda name: name.removeprefix("transformer."))
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "model.safetensors")
    for state, _ in sharded_by_ranks(skeletons(gpt2, 2), tmp_path):
        same(state, reference.state_dict())
    write(reference, tmp_path)
    with torch.device("meta"):
        bare = [GPT2Model(reference.config) for _ in range(2)]
    for state, _ in sharded_by_ranks(bare, tmp_path):
        same(state, reference.transformer.state_dict())


def test_what_the_model_ignores_on_purpose_may_be_in_the_file(tmp_path):
    """GPT-2's masks, which its class names, and rotary tables in every layer, which Llama computes."""
    for make, extra in ((gpt2, "h.0.attn.bias"), (llama, "model.layers.1.self_attn.rotary_emb.inv_freq")):
        reference = seeded(make)
        write(reference, tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(tensors | {extra: torch.zeros(3)}, tmp_path / "model.safetensors")
        for state, _ in sharded_by_ranks(skeletons(make, 1), tmp_path):
            same(state, reference.state_dict())


def test_any_name_of_a_tied_tensor_is_enough_and_equal_copies_are_fine(tmp_path):
    reference = seeded(t5)
    write(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shared = tensors.pop("shared.weight")
    for names in (["lm_head.weight"], ["lm_head.weight", "decoder.embed_tokens.weight"]):
        save_file(tensors | {name: shared.clone() for name in names}, tmp_path / "model.safetensors")
        for state, _ in sharded_by_ranks(skeletons(t5, 2), tmp_path):
            same(state, reference.state_dict())


def test_a_buffer_that_checkpoints_lack_by_design_keeps_or_gets_its_initial_value(tmp_path):
    reference = seeded(bart)
    write(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    for state, _ in sharded_by_ranks([*skeletons(bart, 1), bart()], tmp_path):
        same(state, reference.state_dict())


# Parameters that are left out


@pytest.mark.filterwarnings("ignore:2 of ignored_params are trainable")
def test_left_out_parameters_on_the_meta_device_are_read_whole_on_every_rank(tmp_path):
    reference = seeded(TinyLM)
    save_file(dict(reference.named_parameters()), tmp_path / "x.safetensors")
    models = skeletons(TinyLM, 2)

    def work(comm):
        model = models[comm.rank]
        ignored = [model.blocks[0].side.bias, model.embed.weight]
        model = fully_shard(model, comm, weights=Pretrained(tmp_path / "x.safetensors"), ignored_params=ignored)
        assert model.head.weight is model.embed.weight
        lm_loss(model, batches(1, 2)[0]).backward()
        assert model.embed.weight.grad.shape == (50, 24)
        return whole(model)

    for state in run_ranks(2, work):
        same(state, reference.state_dict())


def test_a_left_out_parameter_with_values_keeps_them_where_the_file_has_none(tmp_path):
    reference = seeded(TinyLM)
    tensors = dict(reference.named_parameters())
    del tensors["unused.bias"]
    save_file(tensors, tmp_path / "x.safetensors")
    models = [copy.deepcopy(reference) for _ in range(2)]

    def work(comm):
        model = models[comm.rank]
        with torch.no_grad():
            model.unused.bias.fill_(3.0)
            model.unused.weight.fill_(3.0)
        ignored = list(model.unused.requires_grad_(requires_grad=False).parameters())
        model = fully_shard(model, comm, weights=Pretrained(tmp_path / "x.safetensors"), ignored_params=ignored)
        return model.unused.bias.tolist(), torch.equal(model.unused.weight, reference.unused.weight)

    assert run_ranks(2, work) == [([3.0, 3.0, 3.0], True)] * 2


# Sharding bottom up, and loading later


def test_blocks_that_were_sharded_before_the_root_are_filled_with_it(tmp_path):
    reference = seeded(TinyLM)
    save_file(dict(reference.named_parameters()), tmp_path / "x.safetensors")
    models = [TinyLM() for _ in range(2)]
    for model in models:
        model.load_state_dict(seeded(TinyLM).state_dict())
        nn.init.zeros_(model.embed.weight)

    def work(comm):
        model = models[comm.rank]
        for block in model.blocks:
            fully_shard(block, comm, wrap=None)
        return whole(fully_shard(model, comm, weights=Pretrained(tmp_path / "x.safetensors")))

    for state in run_ranks(2, work):
        same(state, reference.state_dict())


def test_a_list_of_modules_takes_no_weights(tmp_path):
    def work(comm):
        model = TinyLM()
        with pytest.raises(ConfigError, match="pass it when you shard the model itself"):
            fully_shard(list(model.blocks), comm, weights=Pretrained(tmp_path))

    run_ranks(1, work)


@pytest.mark.parametrize("form", FILES)
def test_load_replaces_the_shards_in_place(form, tmp_path):
    start, target = seeded(t5), t5()
    write(target, tmp_path, form)
    models = [copy.deepcopy(start) for _ in range(3)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = optimizer_for(model)
        seq2seq_loss(model, batches(1, 2)[0]).backward()
        addresses = [p.data_ptr() for p in model.parameters()]
        load(model, tmp_path)
        assert [p.data_ptr() for p in optimizer.param_groups[0]["params"]] == addresses
        assert all(p.grad is not None for p in model.parameters())
        return whole(model)

    for state in run_ranks(3, work):
        same(state, target.state_dict())


def test_load_between_forward_and_backward_is_noticed(tmp_path):
    write(seeded(t5), tmp_path)
    models = [seeded(t5) for _ in range(2)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        loss = seq2seq_loss(model, batches(1, 2)[0])
        load(model, tmp_path)
        with pytest.raises(ShardingError, match="changed"):
            loss.backward()

    run_ranks(2, work)


def test_load_after_an_evaluation_that_kept_gathered_weights(tmp_path):
    target = seeded(t5)
    write(target, tmp_path)
    models = [t5() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = batches(1, 2)[0]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, strategy=ShardingStrategy.SHARD_GRAD_OP)
        seq2seq_loss(model, tokens)
        load(model, tmp_path)
        return seq2seq_loss(model, tokens).item()

    expected = seq2seq_loss(target, tokens).item()
    assert run_ranks(2, work) == pytest.approx([expected, expected], abs=1e-6)


def test_load_keeps_frozen_shards_in_their_dtype(tmp_path):
    reference = seeded(lm_with_frozen_parts)
    save_file(dict(reference.named_parameters()), tmp_path / "x.safetensors")
    models = [lm_with_frozen_parts() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=MixedPrecision(param="bfloat16", reduce="float32"))
        load(model, tmp_path / "x.safetensors")
        return [{n: t.clone() for n, t in tensors.items() if t is not None} for _, tensors in full_tensors(model)]

    expected = dict(reference.named_parameters())
    found = {name: tensor for unit in run_ranks(2, work)[0] for name, tensor in unit.items()}
    assert {t.dtype for t in found.values()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in found.items())


def test_load_takes_a_sharded_model(tmp_path):
    with pytest.raises(ShardingError, match="is not sharded"):
        load(TinyLM(), tmp_path)


# Faults


def fault(directory, kind):
    """Damage a saved t5."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if kind == "missing":
        for name in [name for name in tensors if "SelfAttention" in name][:7]:
            del tensors[name]
    elif kind == "unexpected":
        tensors |= {"lora.a": torch.zeros(2), "lora.b": torch.zeros(3)}
    elif kind == "misshapen":
        tensors["encoder.final_layer_norm.weight"] = torch.zeros(3)
    elif kind == "integers":
        tensors["encoder.final_layer_norm.weight"] = torch.zeros(32, dtype=torch.int64)
    elif kind == "untied":
        tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, path)
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "header":
        path.write_bytes(content[:8] + b"#" + content[9:])
    elif kind == "no file":
        path.unlink()


FAULTS = {
    "missing": r"7 tensors \((\S+SelfAttention\.\w+\.weight, ){5}…\) are missing",
    "unexpected": r"2 tensors \(lora\.a, lora\.b\) are not the model's",
    "misshapen": r"1 tensor \(encoder\.final_layer_norm\.weight: \(3,\) in the file, \(32,\) in the model\) is of",
    "integers": r"torch\.int64 in the file, torch\.float32 in the model\) is of another shape or kind",
    "untied": r"1 tensor \(shared\.weight = lm_head\.weight\) is tied in the model but differently stored",
    "truncated": "ends at byte .* of the data, which has",
    "header": "is not JSON",
    "no file": "holds no weights: none of model.safetensors",
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("where", ["every rank", "one rank"])
def test_a_fault_is_the_same_error_on_every_rank_and_nothing_changes(kind, where, tmp_path):
    for name in ("good", "bad"):
        write(seeded(t5), tmp_path / name)
    fault(tmp_path / "bad", kind)
    fresh = [seeded(t5) for _ in range(3)]
    sharded = [seeded(t5) for _ in range(3)]

    def work(comm):
        path = tmp_path / ("good" if where == "one rank" and comm.rank != 1 else "bad")
        model = fresh[comm.rank]
        with pytest.raises(CheckpointError) as before:
            fully_shard(model, comm, weights=Pretrained(path))
        same(model.state_dict(), seeded_state)
        model = fully_shard(sharded[comm.rank], comm)
        with pytest.raises(CheckpointError) as after:
            load(model, path)
        same(whole(model), seeded_state)
        return str(before.value), str(after.value)

    seeded_state = seeded(t5).state_dict()
    texts = {text for rank in run_ranks(3, work) for text in rank}
    assert len(texts) == 1
    (text,) = texts
    assert re.search(FAULTS[kind], text), text
    assert str(tmp_path / "bad") in text


def test_a_fault_leaves_a_model_without_memory_as_it_was(tmp_path):
    write(seeded(llama), tmp_path)
    renamed(tmp_path, lambda name: name.replace("mlp", "ffn"))
    (model,) = skeletons(llama, 1)

    def work(comm):
        with pytest.raises(CheckpointError, match=r"6 tensors .* are missing; 6 tensors .* are not the model's"):
            fully_shard(model, comm, weights=Pretrained(tmp_path))

    run_ranks(1, work)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_disk_that_fails_in_the_middle_on_one_rank_reaches_every_rank(tmp_path, monkeypatch):
    write(seeded(t5), tmp_path)
    models = skeletons(t5, 3)
    fill, calls = safetensors_file.SafetensorsFile._fill, []

    def failing(self, *args):
        calls.append(self)
        if len(calls) == 40:
            raise OSError(5, "Input/output error")
        fill(self, *args)

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "_fill", failing)

    def work(comm):
        with pytest.raises(CheckpointError) as caught:
            fully_shard(models[comm.rank], comm, weights=Pretrained(tmp_path))
        comm.barrier()
        return str(caught.value)

    texts = run_ranks(3, work)
    assert len(set(texts)) == 1
    assert texts[0].endswith("model.safetensors cannot be read: Input/output error.")


def test_weights_on_some_ranks_only_are_noticed(tmp_path):
    write(seeded(t5), tmp_path)
    models = [seeded(t5) for _ in range(2)]

    def work(comm):
        with pytest.raises(MismatchError, match="different models or policies"):
            fully_shard(models[comm.rank], comm, weights=Pretrained(tmp_path) if comm.rank else None)

    run_ranks(2, work)


def test_an_index_that_names_a_file_which_is_gone(tmp_path):
    write(seeded(t5), tmp_path, "several")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    gone = sorted(set(weight_map.values()))[1]
    (tmp_path / gone).unlink()
    (model,) = skeletons(t5, 1)

    def work(comm):
        with pytest.raises(CheckpointError, match=rf"names {gone}, which is not next to it\. Fetch the missing"):
            fully_shard(model, comm, weights=Pretrained(tmp_path))

    run_ranks(1, work)
