"""Source and target of a causal model are separated alike in training, evaluation and prediction, and this is said."""

import json

import pytest

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.config.recorded import read_run, recorded_run
from fullshard.program.data import InputRow
from fullshard.program.launch.programs.predict import changed, make_parser
from fullshard.program.models import build_model
from fullshard.program.train import FileSink, train
from fullshard.program.train.dry_run import dry_run
from fullshard.program.train.evaluation import evaluate
from fullshard.program.train.evaluation.predict import predict
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.setup import prepare as preparing
from fullshard.program.train.setup.prepare import prepare, tokenize_spec
from support.tiny_run import MODEL, Memory, settings
from support.trained_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("unmetered")

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
NOTE = r"source and target are separated by '\n' (data.separator)"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    tokenizer = byte_tokenizer()
    build_model(GPT2, tokenizer, seed=1).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def config_of(directory, base, **changes):
    lengths = {"data__max_source_length": 30, "data__max_target_length": 20}
    short = {"training__max_steps": 2, "nproc": 1, "data__max_train_samples": 6, "data__max_eval_samples": 2}
    values = settings(directory, model={"path": str(base)}, **(lengths | short | changes))
    return RunConfig.model_validate(values)


def run(config):
    memory = Memory()
    run_ranks(1, lambda comm: train(config, comm, [FileSink(config.output_dir), memory]))
    return memory


def prompts_of_generation(monkeypatch):
    """The texts that are to be continued, in evaluations and predictions."""
    found, generate = [], evaluate.generate

    def seen(model, tokenizer, batch, spec):
        rows = zip(batch.prompt_ids_BP, batch.prompt_mask_BP, strict=True)
        found.extend("".join(tokenizer.convert_ids_to_tokens(ids[mask == 1].tolist())) for ids, mask in rows)
        return generate(model, tokenizer, batch, spec)

    monkeypatch.setattr(evaluate, "generate", seen)
    return found


def test_a_run_says_its_separator_records_it_and_predicts_with_it(tmp_path, base, monkeypatch):
    config = config_of(tmp_path, base)
    evaluated = prompts_of_generation(monkeypatch)
    memory = run(config)
    assert NOTE in memory.begun[0].notes
    assert NOTE in dry_run(config, 2).notes
    assert memory.ended[0].config["data"]["separator"] == "\n"
    assert evaluated
    assert all(text.startswith("<s>") and text.endswith("\n") for text in evaluated)
    # Even if a later version chooses another one.
    monkeypatch.setattr(preparing, "choose_separator", lambda given, *_: "???" if given is None else given)
    out = tmp_path / "out"
    assert prepare(read_run(out)).separator == "\n", "so fullshard evaluate"
    written = prompts_of_generation(monkeypatch)

    def work(comm):
        trained = find_trained(str(out), recorded_run(out))
        model, tokenizer, _ = load_trained(trained, comm)
        return list(predict(model, tokenizer, [InputRow("i lost it", 1)], trained.config, comm))

    run_ranks(1, work)
    assert written == ["<s>i lost it\n"]


def test_a_run_of_an_earlier_version_has_none(tmp_path, base):
    """It put nothing between them."""
    config = config_of(tmp_path, base).as_plain()
    del config["data"]["separator"]
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json").write_text(json.dumps({"config": config}))
    assert recorded_run(out).data.separator == ""
    assert find_trained(str(base)).config.data.separator == "", "nor is it known of a model that is not a run's"


def test_the_command_line_may_say_another(tmp_path, base):
    options = make_parser().parse_args(["m", "rows.txt", "--separator= =>"])
    assert changed(config_of(tmp_path, base), options).data.separator == " =>"


def test_resuming_with_another_one_is_an_error_unless_asked_for(tmp_path, base, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "choose_separator", lambda *_: "")  # as versions without the option did
        run(config_of(tmp_path, base, training__max_steps=1))
    checkpoint = str(tmp_path / "out" / "checkpoints" / "step-00000001")
    with pytest.raises(ConfigError, match=r"trained with '' between .*it would be '\\n'.*'data\.separator=\"\"'"):
        run(config_of(tmp_path, base, resume=checkpoint))
    memory = run(config_of(tmp_path, base, resume=checkpoint, data__separator=""))
    assert [report.step for report in memory.steps] == [2]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"config": MODEL, "tokenizer": {"vocab_size": 60}}, "this one is an encoder-decoder. Remove it."),
        ("chat", "this model has a chat template. Remove it, or set data.chat_template: false."),
    ],
)
def test_a_separator_that_would_not_be_used_is_refused(tmp_path, base, model, message):
    if model == "chat":
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
        tokenizer.save_pretrained(tmp_path / "chat")
        build_model(GPT2, tokenizer, seed=1).save_pretrained(tmp_path / "chat")
        model = {"path": str(tmp_path / "chat")}
    config = RunConfig.model_validate(settings(tmp_path, model=model, data__separator=" =>"))
    with pytest.raises(ConfigError) as error:
        prepare(config)
    assert str(error.value).endswith(message)
    tokenizer = byte_tokenizer()
    assert tokenize_spec(config_of(tmp_path, base, data__separator=""), tokenizer, causal=False).separator == ""
