"""Small runs on preferences, and the same training by hand: one completion at a time, with full logits."""

import csv
import math

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard.program.config import RunConfig
from fullshard.program.train.setup.model import make_model
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.steps import make_plan
from support.tiny_run import settings

PAIRS, STEPS = 13, 10
_T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1}
_LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
MODELS = {
    "t5": _T5 | {"num_heads": 2, "dropout_rate": 0.0},
    "llama": _LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 1},
}
# Of other widths bitsandbytes' kernel for CPUs takes wrong scales.
MODELS["wide llama"] = MODELS["llama"] | {"hidden_size": 64, "intermediate_size": 128}


def write_rows(path, count, start=0, *, labelled=False):
    """Prompts, chosen and rejected completions of different lengths; or one each, two in three of them desirable."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion", "label"] if labelled else ["prompt", "chosen", "rejected"])
        for row in range(start, start + count):
            prompt = " ".join([*["where", "is", "my", "card", "please"][: 1 + row % 5], str(row)])
            good, bad = "yes " * (1 + row % 3), f"no {row}" * (1 + row % 2)
            writer.writerow([prompt, *((bad if row % 3 == 1 else good, row % 3 != 1) if labelled else (good, bad))])


def pair_settings(directory, kind="t5", **changes):
    """The settings of a run over pairs, or with kto over labels, that this writes to ``directory``."""
    values = settings(directory, model={"config": MODELS[kind], "tokenizer": {"vocab_size": 60}})
    labelled = changes.get("training__objective") == "kto"
    write_rows(directory / "train.csv", PAIRS, labelled=labelled)
    write_rows(directory / "held_out.csv", 5, start=PAIRS, labelled=labelled)
    values["data"] |= {"source_column": None, "target_column": None, "max_source_length": 16}
    values["training"] = {
        "objective": "dpo",
        "learning_rate": 1e-2,
        "max_steps": STEPS,
        "lr_scheduler_type": "constant",
        "max_grad_norm": None,
        "per_device_train_batch_size": 6,
        "eval_strategy": "no",
        "save_strategy": "no",
    }
    values["evaluation"] = {}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values[section] = values[section] | {key: value} if key else value
    return values


def saved_start(directory, kind="t5", **options):
    """The path of a model with random weights and its tokenizer; ``options`` of its configuration."""
    values = pair_settings(directory, kind)
    values["model"]["config"] = values["model"]["config"] | options
    config = RunConfig.model_validate(values)
    tokenizer = prepare(config).tokenizer
    make_model(config, tokenizer).save_pretrained(directory / "start")
    tokenizer.save_pretrained(directory / "start")
    return str(directory / "start")


def logp(model, source, target, *, causal):
    """The log-probability of one completion."""
    source, target = torch.tensor([source.tolist()]), torch.tensor([target.tolist()])
    if causal:
        logits = model(input_ids=torch.cat([source, target], 1)).logits[:, source.shape[1] - 1 : -1]
    else:
        logits = model(input_ids=source, labels=target).logits
    return logits.log_softmax(-1).gather(-1, target[..., None]).sum()


def loss_by_hand(name, chosen, rejected, lengths, before, *, beta, gamma):
    """The papers' loss of one pair; ``before`` are the reference's log-probabilities."""
    if name == "dpo":
        return -logsigmoid(beta * ((chosen - before[0]) - (rejected - before[1])))
    means, first = [chosen / lengths[0], rejected / lengths[1]], [before[0] / lengths[0], before[1] / lengths[1]]
    if name == "ipo":
        return ((means[0] - first[0]) - (means[1] - first[1]) - 1 / (2 * beta)) ** 2
    if name == "simpo":
        return -logsigmoid(beta * (means[0] - means[1]) - gamma)
    odds = [mean - torch.log(1 - mean.exp()) for mean in means]
    return -means[0] - beta * logsigmoid(odds[0] - odds[1])


def labelled_loss_by_hand(training, gain, divergence, *, good):
    """The paper's loss of one completion (arXiv:2402.01306, equations 7 and 8); ``gain``: its log-ratio."""
    weight = training.desirable_weight if good else training.undesirable_weight
    value = torch.sigmoid(training.beta * (gain - divergence if good else divergence - gain))
    return weight * (1 - value)


def train_by_hand(config, model, reference):
    """Losses and rewards of all steps; ``model`` has the last weights, ``reference(f)`` calls f of the reference."""
    data = prepare(config)
    plan = make_plan(config, data.train_set, 1, causal=data.causal)
    training, rows = config.training, data.train_set
    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad], lr=training.learning_rate, weight_decay=0.0
    )

    def of(row, one):
        return logp(one, rows.source_ids[row], rows.target_ids[row], causal=data.causal)

    def unrelated(row, one):  # all prompts are different: the next row's completion, of the last row the first's
        return logp(one, rows.source_ids[2 * row], rows.target_ids[2 * ((row + 1) % PAIRS)], causal=data.causal)

    labelled = training.objective == "kto"
    with torch.no_grad():
        before = reference(lambda one: [float(of(row, one)) for row in range(len(rows))])
        others = reference(lambda one: [float(unrelated(row, one)) for row in range(PAIRS)]) if labelled else []
    losses, rewards = [], []
    for step in range(STEPS):
        epoch, number = divmod(step, plan.num_steps)
        ((indices, fillers),) = plan.for_epoch(epoch).step_places(number, 0)
        pairs = sorted({row // 2 for row, filler in zip(indices.tolist(), fillers, strict=True) if not filler})
        total, divergence, sides = 0.0, 0.0, ([], [])
        if labelled:
            with torch.no_grad():
                divergence = max(0.0, sum(float(unrelated(row, model)) - others[row] for row in pairs) / len(pairs))
        for pair in pairs:
            if labelled:
                gain = of(2 * pair, model) - before[2 * pair]
                loss = labelled_loss_by_hand(training, gain, divergence, good=pair % 3 != 1)
                (loss / len(pairs)).backward()
                total += loss.item() / len(pairs)
                sides[pair % 3 == 1].append(training.beta * gain.item())
                continue
            both = [2 * pair, 2 * pair + 1]
            lengths = [len(rows.target_ids[row]) for row in both]
            how = {"beta": training.beta, "gamma": training.simpo_gamma}
            found, first = [of(row, model) for row in both], [before[row] for row in both]
            loss = loss_by_hand(training.objective, *found, lengths, first, **how)
            for side, logp_of, was, length in zip(sides, found, first, lengths, strict=True):
                less = was if training.preference_has_reference else 0.0
                share = 1 if training.objective == "dpo" else length
                side.append(training.beta * (logp_of.item() - less) / share)
            (loss / len(pairs)).backward()
            total += loss.item() / len(pairs)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        rewards.append(means_of(*sides, kl=divergence if labelled else None))
    assert all(map(math.isfinite, losses))
    return losses, rewards


def means_of(chosen, rejected, kl):
    """The rewards that TRL logs for a step."""
    means = {name: sum(one) / len(one) for name, one in (("chosen", chosen), ("rejected", rejected)) if one}
    if len(means) == 2:
        means["margins"] = means["chosen"] - means["rejected"]
    if kl is None:
        means["accuracies"] = sum(one > other for one, other in zip(chosen, rejected, strict=True)) / len(chosen)
    return {f"rewards/{name}": one for name, one in means.items()} | ({} if kl is None else {"kl": kl})


def start_of(config):
    """The model that a run starts with, unsharded."""
    data = prepare(config)
    if config.model.path is None:
        return make_model(config, data.tokenizer)
    kind = AutoModelForCausalLM if data.causal else AutoModelForSeq2SeqLM
    return kind.from_pretrained(config.model.path)
