"""Evaluation under sharding against the unsharded model, row by row."""

import copy
import math

import pytest
import torch

from fullshard import fully_shard, unsharded
from fullshard.core.engine.setup import wrap
from fullshard.core.policy import TransformerBlocks
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.data import CollateSpec, TokenizeSpec, tokenize
from fullshard.program.data.examples import Example
from fullshard.program.metrics import baselines
from fullshard.program.models import build_model, train_tokenizer
from fullshard.program.train.evaluation import generation as generation_module
from fullshard.program.train.evaluation.evaluate import EvaluationSpec, HeldOut, evaluate, evaluation_spec
from fullshard.program.train.evaluation.generation import GenerationSpec, fits_at_once
from support.parity import replicas
from support.tiny_run import settings

WORDS = ["where", "is", "my", "card", "i", "lost", "it", "what", "is", "the", "rate", "of", "exchange", "today"]
SIZES = {
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
}
BLOCKS = {"t5": "T5Block", "gpt2": "GPT2Block"}
END = {"t5": 2.5, "gpt2": 1.5}
"""How much more often than another token the end is written: so that some rows end early and some do not."""

GREEDY = GenerationSpec(max_new_tokens=7)
BEAMS = GenerationSpec(max_new_tokens=6, min_new_tokens=2, num_beams=3, length_penalty=-1.0, no_repeat_ngram_size=2)


def examples(count):
    """Rows of one to six words; every third has two references."""
    return [
        Example(
            " ".join(WORDS[row : row + 1 + row * 5 % 6]), (f"text {row}", "other text")[: 1 + (row % 3 == 0)], row + 1
        )
        for row in range(count)
    ]


class Setting:
    """A model of random weights that writes various texts of various lengths, and rows for it."""

    def __init__(self, kind, ranks, rows=7):
        self.kind, self.rows = kind, examples(rows)
        self.tokenizer = train_tokenizer([row.source for row in self.rows] + [row.target for row in self.rows], 60)
        self.reference, self.models = replicas(self._make, ranks)
        causal = kind == "gpt2"
        self.tokenized = tokenize(self.rows, self.tokenizer, TokenizeSpec(16, 8, causal=causal))
        self.held_out = HeldOut(self.rows, self.tokenized, CollateSpec(0, causal=causal), ["text 1"], "text 1")

    def _make(self):
        model = build_model({"model_type": self.kind, **SIZES[self.kind]}, self.tokenizer, seed=5)
        torch.manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 1.2 if parameter.shape[0] == len(self.tokenizer) else 0.6)
            model.get_input_embeddings().weight[self.tokenizer.eos_token_id] *= END[self.kind]
        return model.train()

    def spec(self, generation=GREEDY, metrics=("exact_match", "rougeL"), batch_size=2):
        sources = [row.source for row in self.rows]
        found = baselines(metrics, sources, self.held_out.references, majority="text 1")
        return EvaluationSpec(self.held_out, batch_size, generation, None, tuple(metrics), found)

    def evaluate(self, ranks, spec, **options):
        """Every rank's report."""

        def work(comm):
            model = self.models[comm.rank]
            fully_shard(model, comm, wrap=TransformerBlocks((BLOCKS[self.kind],)))
            return evaluate(model, self.tokenizer, spec, comm, step=3, epoch=1.5, **options)

        return run_ranks(ranks, work)

    @torch.no_grad()
    def alone(self, generation):
        """What transformers writes with the whole model, one row at a time and without padding; ids."""
        model = copy.deepcopy(self.reference).eval()
        options = {"max_new_tokens": generation.max_new_tokens, "do_sample": False}
        if generation.num_beams > 1:
            options |= {
                "min_new_tokens": generation.min_new_tokens,
                "num_beams": generation.num_beams,
                "length_penalty": generation.length_penalty,
                "no_repeat_ngram_size": generation.no_repeat_ngram_size,
            }
        written = []
        for ids in self.tokenized.source_ids:
            row = torch.tensor([list(map(int, ids))])
            text = model.generate(input_ids=row, attention_mask=torch.ones_like(row), **options)[0]
            written.append(text[row.shape[1] :] if self.kind == "gpt2" else text[1:])
        return written

    def decode(self, rows):
        return [text.strip() for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]

    @torch.no_grad()
    def loss(self):
        model = copy.deepcopy(self.reference).eval()
        total = count = 0
        for source, target in zip(self.tokenized.source_ids, self.tokenized.target_ids, strict=True):
            source, target = list(map(int, source)), list(map(int, target))
            if self.kind == "gpt2":
                ids = torch.tensor([source + target])
                loss = model(input_ids=ids, labels=torch.tensor([[-100] * len(source) + target])).loss
            else:
                loss = model(input_ids=torch.tensor([source]), labels=torch.tensor([target])).loss
            total += loss.item() * len(target)
            count += len(target)
        return total / count


@pytest.mark.parametrize("generation", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_every_row_is_written_as_by_the_whole_model_alone(kind, ranks, generation):
    setting = Setting(kind, ranks)
    expected = setting.alone(generation)
    assert len({len(row) for row in expected}) > 1, "rows of one length would not show who waits for whom"
    assert len(set(setting.decode(expected))) > 3
    reports = setting.evaluate(ranks, setting.spec(generation))
    for report in reports:
        assert [one.prediction for one in report.predictions] == setting.decode(expected)
        assert [(one.source, one.references) for one in report.predictions] == [
            (row.source, row.references) for row in setting.rows
        ]
        assert report.loss == pytest.approx(setting.loss(), rel=1e-5)
        assert report.metrics == reports[0].metrics


def test_the_report_has_all_metrics_beside_their_baselines():
    setting = Setting("t5", 2)
    metrics = ("accuracy", "chrf", "perplexity")
    report, other = setting.evaluate(2, setting.spec(metrics=metrics))
    assert tuple(report.metrics) == metrics
    assert (report.metric, report.value) == ("accuracy", report.metrics["accuracy"])
    assert report.metrics["perplexity"] == pytest.approx(math.exp(report.loss))
    assert (report.baseline, report.baseline_name) == (pytest.approx(1 / 7), "always 'text 1'")
    assert report.baselines.keys() == {"accuracy", "chrf"}
    assert sum(rows for *_, rows in report.confusion.cells) == 7
    assert report.confusion == other.confusion
    assert (report.step, report.epoch) == (3, 1.5)
    values = report.as_dict()
    assert values["metrics"] == report.metrics
    assert not {"predictions", "confusion"} & values.keys()
    assert report.predictions[3].as_dict() == {
        "input": setting.rows[3].source,
        "prediction": report.predictions[3].prediction,
        "references": ["text 3", "other text"],
    }


def test_perplexity_alone_generates_nothing(monkeypatch):
    setting = Setting("gpt2", 2)
    for model in setting.models:
        monkeypatch.setattr(model, "generate", None)
    for report in setting.evaluate(2, setting.spec(metrics=("perplexity",))):
        assert report.metrics == {"perplexity": pytest.approx(math.exp(setting.loss()), rel=1e-4)}
        assert (report.baseline, report.baseline_name, report.predictions) == (None, None, ())


def test_the_models_own_generation_settings_give_way_and_come_back():
    setting = Setting("t5", 1)
    expected = setting.decode(setting.alone(GREEDY))
    own = setting.models[0].generation_config
    own.update(num_beams=4, min_length=6, max_length=9, do_sample=True, temperature=3.0, early_stopping=True)
    before = own.to_dict()
    (report,) = setting.evaluate(1, setting.spec())
    assert [one.prediction for one in report.predictions] == expected
    assert setting.models[0].generation_config is own
    assert own.to_dict() == before
    assert setting.models[0].training


def test_progress_is_told_after_each_batch_and_may_end_the_evaluation():
    class Enough(Exception):
        pass

    setting, seen = Setting("t5", 2), []

    def progress(done, total):
        seen.append((done, total))
        if done == 2:
            raise Enough

    def work(comm):
        fully_shard(setting.models[comm.rank], comm, wrap=None)
        with pytest.raises(Enough):
            evaluate(
                setting.models[comm.rank],
                setting.tokenizer,
                setting.spec(metrics=("perplexity",), batch_size=1),
                comm,
                step=0,
                epoch=0.0,
                progress=progress,
            )
        return setting.models[comm.rank].training

    assert run_ranks(2, work) == [True, True]
    assert sorted(seen) == [(1, 4), (1, 4), (2, 4), (2, 4)]


def make_spec(directory, held_out, **changes):
    return evaluation_spec(RunConfig.model_validate(settings(directory, **changes)), held_out)


def test_the_settings_say_what_is_measured_and_how_text_is_written(tmp_path):
    held_out = Setting("t5", 0).held_out
    evaluation = {"metric": "rougeL", "metrics": ["bleu", "rougeL", "exact_match"], "num_beams": 2, "lead_sentences": 2}
    spec = make_spec(tmp_path, held_out, evaluation=evaluation)
    assert spec.metrics == ("rougeL", "bleu", "exact_match")
    assert spec.metric == "rougeL"
    assert spec.baseline.name == "first 2 sentences"
    assert spec.baselines["exact_match"].value == pytest.approx(1 / 7)
    assert spec.generation == GenerationSpec(max_new_tokens=8, num_beams=2)
    assert spec.batch_size == 2


def test_accuracy_is_for_label_sets(tmp_path):
    rows = Setting("t5", 0).held_out
    with pytest.raises(ConfigError, match="needs a label set"):
        make_spec(tmp_path, HeldOut(rows.examples, rows.tokenized, rows.collate), evaluation__metric="accuracy")


# All units gathered once

DRAWN = GenerationSpec(max_new_tokens=6, temperature=0.7)


def between_steps(setting, ranks, generation, *, at_once, tables="gather"):
    """Evaluate between two steps: each rank's report, bytes of its gathers, those of the model's, and weights."""

    def work(comm):
        ledger, model = RecordingComm(comm), setting.models[comm.rank].eval()  # ranks are threads: they share draws
        fully_shard(model, ledger, wrap=TransformerBlocks((BLOCKS[setting.kind],)), tables=tables)
        optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.arange(8).reshape(2, 4) + comm.rank
        sent = sum(lane.shard.nbytes for unit in model._fullshard_runtime.units for lane in unit.lanes)
        report, gathers = None, 0
        for step in range(2):
            ledger.entries.clear()
            if step and at_once is not None:
                torch.manual_seed(0)
                spec = setting.spec(generation)
                report = evaluate(model, setting.tokenizer, spec, ledger, step=1, epoch=1.0, at_once=at_once)
                gathers = sum(one.sent_bytes for one in ledger.entries if one.collective == "all_gather")
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with unsharded(model):
            weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        return report, gathers, (comm.size - 1) * sent, weights

    return run_ranks(ranks, work)


@pytest.mark.parametrize(
    ("kind", "ranks", "generation"),
    [("t5", 2, GREEDY), ("gpt2", 3, GREEDY), ("t5", 3, BEAMS), ("gpt2", 1, DRAWN), ("t5", 1, DRAWN)],
)
def test_an_evaluation_that_gathers_once_writes_the_same_and_changes_no_later_step(kind, ranks, generation):
    runs = [between_steps(Setting(kind, ranks), ranks, generation, at_once=how) for how in (None, False, True)]
    for (*_, undisturbed), (report, often, _, _), (other, once, model, weights) in zip(*runs, strict=True):
        assert once == model <= often / 5
        assert other.predictions == report.predictions
        assert other.loss == report.loss
        assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)


def test_tables_at_home_measure_the_same_loss_and_are_gathered_for_texts(monkeypatch):
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 1)
    runs = [between_steps(Setting("t5", 2), 2, GREEDY, at_once=how, tables="home") for how in (False, True)]
    for (report, often, *_), (other, once, model, _) in zip(*runs, strict=True):
        assert model < once < often / 2  # blocks also for the loss of each batch
        assert (other.predictions, other.loss) == (report.predictions, report.loss)


@pytest.mark.parametrize(("free", "fits"), [(2, True), (1.99, False), (None, False)])
def test_without_a_plan_units_are_gathered_once_where_they_take_half_of_the_free_memory(monkeypatch, free, fits):
    """Ranks share the machine's memory; where the system does not report it, nothing is taken."""
    setting = Setting("t5", 2)

    def work(comm):
        model = fully_shard(setting.models[comm.rank], comm)
        lanes = [lane for unit in model._fullshard_runtime.units for lane in unit.lanes]
        pools = {} if free is None else {"machine: x": int(2 * free * sum(4 * lane.numel for lane in lanes))}
        monkeypatch.setattr(generation_module, "free_memory", lambda device: pools)
        return fits_at_once(model, comm)

    assert run_ranks(2, work) == [fits, fits]
