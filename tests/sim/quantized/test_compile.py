"""A quantised model of compiled blocks trains as uncompiled: the compiler leaves its graph at quantised layers."""

import pytest
import torch
from torch._dynamo.utils import counters

from fullshard import Pretrained, Quantize, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.program.models import AdapterSpec, AdapterWeights, add_adapter, compile_blocks
from support import quantized
from support.models import batches, causal_loss, seq2seq_loss
from support.parity import ROWS_PER_RANK, train_sharded
from support.quantized import SKIP, llama, lora_values, t5

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]  # torch's compiler warns about its own code


MODELS = {"llama": (llama, causal_loss, ("lm_head",)), "t5": (t5, seq2seq_loss, SKIP)}


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["llama", "t5"])  # two kinds of blocks
@pytest.mark.parametrize("type", ["nf4", "int8"])
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_blocks_of_quantised_layers_train_alike(type, backend, kind):
    make, loss_of, skip = MODELS[kind]
    _, path = quantized.saved(make)
    data = batches(10, ROWS_PER_RANK)

    def train(comm, *, compiled):
        with torch.device("meta"):
            model = make()
        model.tie_weights()
        adapted = add_adapter(model, AdapterSpec("lora", str(path), r=4, lora_alpha=8), seed=0)
        if compiled:
            compile_blocks(adapted.model, backend=backend)
        source = Pretrained(path, quantize=Quantize(type, skip=skip))
        fully_shard(adapted.model, comm, weights=AdapterWeights(source, lora_values(adapted.model)))
        return train_sharded(adapted.model, comm, loss_of, data, sharded=True)

    plain = run_ranks(1, lambda comm: train(comm, compiled=False))[0]
    torch._dynamo.reset()
    counters.clear()
    quantized.assert_same(run_ranks(1, lambda comm: train(comm, compiled=True))[0], plain)
    assert counters["stats"]["unique_graphs"] > 0
