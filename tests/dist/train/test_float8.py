"""Training in fp8, emulated on two ranks; all cases share one pair of processes."""

import pytest

from support.float8_runs import RUNS, float8_cases
from support.processes import selected
from support.torchao_folder import needs_torchao

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600), needs_torchao]
BESIDE = ("beside_llama", "beside_llama_gathers", "beside_t5")


SLOW = {"beside_llama_gathers"}


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return float8_cases([*selected(request, "case"), *RUNS], tmp_path_factory.mktemp("float8"))


@pytest.mark.parametrize("case", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in BESIDE])
def test_losses_and_weights_are_those_of_fsdp2_to_the_bit(case, ranks):
    found = ranks[case]
    assert found["ours"] == found["theirs"]
    assert len(set(found["ours"])) == 4
    assert found["apart"] == []
    assert found["weights"] > found["layers"] >= 14  # all but the embeddings were trained


@pytest.mark.slow
def test_compiled_blocks_compute_with_weights_gathered_in_fp8_by_the_graphs_of_the_first_step(tmp_path):
    in_bf16, compiled = float8_cases(["beside_llama", "beside_llama_compiled"], tmp_path).values()
    assert compiled["ours"] == compiled["theirs"]  # FSDP2's, uncompiled
    assert compiled["apart"] == []
    assert 0 < compiled["graphs"][0] == compiled["graphs"][-1]
    assert compiled["gathered"] < 0.6 * in_bf16["gathered"]  # of blocks, the head and embeddings
    assert compiled["evaluated"] == compiled["evaluated_uncompiled"]


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(ranks):
    whole, resumed = ranks["run"], ranks["run_interrupted"]
    assert resumed["ended"].startswith("stopped after")
    for part in ("loss", "texts", "tensors"):
        assert resumed[part] == whole[part]


def test_a_saved_model_is_plain_and_was_trained_otherwise_than_in_bf16(ranks):
    found, plain = ranks["run"]["tensors"], ranks["run_bf16"]["tensors"]
    assert {name: dtype for name, (dtype, _) in found.items()} == {name: dtype for name, (dtype, _) in plain.items()}
    assert found != plain
    assert ranks["run"]["loss"] == pytest.approx(ranks["run_bf16"]["loss"], rel=0.2)
    assert ranks["run"]["names_torchao"] == ranks["lora"]["names_torchao"] == 0


def test_an_adapter_over_an_fp8_base_is_saved_as_pefts(ranks):
    tensors = ranks["lora"]["tensors"]
    assert {name.rsplit(".", 2)[1] for name in tensors} == {"lora_A", "lora_B"}
    assert {dtype for dtype, _ in tensors.values()} == {"torch.float32"}
