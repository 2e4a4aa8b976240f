"""A quantised run resumes to the bit, on as many ranks or others; its adapter is saved alone."""

import peft
import pytest
import torch

from fullshard import Checkpoints, load_checkpoint, save
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from support import quantized
from support.models import batches, seq2seq_loss
from support.parity import ROWS_PER_RANK, optimizer_for
from support.quantized import NF4, t5


def train(model, comm, data):
    optimizer = optimizer_for(model)
    losses = steps(model, optimizer, comm, data)
    return optimizer, losses


def steps(model, optimizer, comm, data):
    losses = []
    for tokens in data:
        loss = seq2seq_loss(model, tokens[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_run_resumes_with_the_same_codes_scales_and_losses(tmp_path):
    _, path = quantized.saved(t5, tmp_path / "model")
    data = batches(6, 2 * ROWS_PER_RANK)

    def whole(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        optimizer, _ = train(model, comm, data[:3])
        with Checkpoints(tmp_path / "run", ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=3)
        codes = [rows_of(param).clone() for param in model.parameters() if not param.requires_grad]
        return codes, steps(model, optimizer, comm, data[3:])

    def resumed(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        with torch.no_grad():
            for param in model.parameters():
                rows_of(param).zero_()
        optimizer = optimizer_for(model)
        load_checkpoint(model, optimizer, tmp_path / "run" / "step-00000003")
        codes = [rows_of(param).clone() for param in model.parameters() if not param.requires_grad]
        return codes, steps(model, optimizer, comm, data[3:])

    for (codes, losses), (again, later) in zip(run_ranks(2, whole), run_ranks(2, resumed), strict=True):
        assert losses == later
        assert all(torch.equal(one, other) for one, other in zip(codes, again, strict=True))


def test_a_checkpoint_is_loaded_on_another_number_of_ranks(tmp_path):
    _, path = quantized.saved(t5, tmp_path / "model")

    def write(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        with Checkpoints(tmp_path / "run", ranks=comm) as checkpoints:
            checkpoints.save(model, None, step=1)
        return quantized.stored(model)

    def read(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        with torch.no_grad():
            for param in model.parameters():
                rows_of(param).zero_()
        load_checkpoint(model, None, tmp_path / "run" / "step-00000001")
        return quantized.stored(model)

    before = run_ranks(2, write)[0]
    for after in run_ranks(3, read):
        for name, parts in before.items():
            assert all(torch.equal(one, other) for one, other in zip(parts, after[name], strict=True)), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_adapter_is_saved_alone_and_peft_loads_it_over_bitsandbytes_layers(tmp_path):
    model, path = quantized.saved(t5, tmp_path / "model")
    data = batches(2, 2 * ROWS_PER_RANK)

    def write(comm):
        mine = quantized.sharded_from_files(t5, path, comm, NF4)
        train(mine, comm, data)
        save(mine, tmp_path / "adapter")
        with torch.no_grad():
            return mine(input_ids=data[0], decoder_input_ids=data[0]).logits

    ours = run_ranks(2, write)[0]
    base = quantized.with_bitsandbytes(model, NF4)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        assert theirs(input_ids=data[0], decoder_input_ids=data[0]).logits == pytest.approx(ours, abs=1e-5)
