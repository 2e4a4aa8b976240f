"""The batch that a run is planned with: at least as large as any that it trains on."""

from types import SimpleNamespace

import numpy as np

from fullshard.config import load_run
from fullshard.data import steps
from fullshard.train.plan import longest_batch, longest_rows
from fullshard.train.setup.data_plan import make_plan
from fullshard.train.setup.prepare import collate_spec, prepare
from support.planned import write_run


def rows(*lengths):
    sources, targets = zip(*lengths, strict=True)
    return SimpleNamespace(
        source_ids=SimpleNamespace(lengths=np.array(sources)), target_ids=SimpleNamespace(lengths=np.array(targets))
    )


def test_the_longest_source_and_the_longest_target_come_together():
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 2, causal=False) == [1, 2]
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 3, causal=False) == [1, 2, 3]


def test_one_row_or_one_sequence_counts_by_its_total():
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 1, causal=False) == [3]
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 2, causal=True) == [3, 0]


def test_a_small_set_gives_all_its_rows():
    assert longest_rows(rows((5, 5), (9, 1)), 8, causal=False) == [1, 0]


def test_no_batch_of_three_epochs_is_larger(tmp_path):
    config = load_run(write_run(tmp_path, training__train_sampling_strategy="random"), [])
    data = prepare(config)
    planned = longest_batch(config, data)
    plan = make_plan(config, data.train_set, 2, causal=data.causal)
    spec = collate_spec(data.tokenizer, causal=data.causal)
    for epoch in range(3):
        for step in steps(data.train_set, plan.for_epoch(epoch), 0, spec):
            for batch in step:
                for name in ("input_ids_BS", "labels_BT"):
                    size, most = getattr(batch, name).shape, getattr(planned, name).shape
                    assert all(one <= other for one, other in zip(size, most, strict=True))
