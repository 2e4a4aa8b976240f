"""How much less a rank holds if ranks share rows of 8,192 tokens, and what it sends for that.

    python benchmarks/long.py [--tokens 8192]

Each line is a plan of rank 0 in one process: the real model, ``sequence_parallel``, ``fully_shard`` and AdamW take
three steps on tensors without memory, with the CPU's operators in fp32. ``activations`` is what the fullest moment of a
step holds besides parameters, gradients and optimizer state; ``exchanged`` is what the rank sends for attention in a
step, beside what its shapes say it must. Nothing is timed.
"""

import argparse
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from fullshard import fully_shard, sequence_parallel
from fullshard.planner.simulation import PlannedStep, simulate

MIB = 1 << 20
WIDTH, HEADS, LAYERS, TARGET = 512, 8, 4, 1024


def llama(tokens):
    config = LlamaConfig(
        vocab_size=8192, hidden_size=WIDTH, intermediate_size=1376, num_hidden_layers=LAYERS, num_attention_heads=HEADS
    )
    ids = torch.randint(3, 8192, (1, tokens))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def t5(tokens):
    config = T5Config(
        vocab_size=8192, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=1024, num_layers=LAYERS, num_heads=HEADS
    )
    config.decoder_start_token_id = 0
    labels = torch.randint(3, 8192, (1, TARGET))
    return T5ForConditionalGeneration(config), {"input_ids": torch.randint(3, 8192, (1, tokens)), "labels": labels}


def sent_for_attention(kind, tokens, ranks):
    """Bytes that one of ``ranks`` sends: of queries, keys, values and outputs, all but its own part, there and back."""
    each = (ranks - 1) / ranks**2 * WIDTH * 4 * 2
    if kind == "llama":
        return LAYERS * 4 * tokens * each
    return LAYERS * (4 * tokens + 4 * TARGET + 2 * TARGET + 2 * tokens) * each


def planned(make, tokens, ranks):
    """The simulation of rank 0 of ``ranks`` that share rows."""

    def build(comm):
        model, batch = make(tokens)
        model = fully_shard(sequence_parallel(model.train(), comm), comm)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

        return PlannedStep(model, optimizer, step)

    return simulate(build, 0, ranks, timed=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a row (of T5: of its source)")
    tokens = parser.parse_args().tokens
    print(f"{'model':<8}{'ranks':>6}{'activations':>16}{'of one rank':>13}{'exchanged':>14}{'arithmetic':>14}")
    for make in (llama, t5):
        alone = None
        for ranks in (1, 2, 4):
            found = planned(partial(make), tokens, ranks)
            held = found.parts["activations_and_temporaries"]
            alone = alone or held
            sent = found.sent.get("exchange", (0, 0))[1]
            expected = sent_for_attention(make.__name__, tokens, ranks)
            print(
                f"{make.__name__:<8}{ranks:>6}{held / MIB:>12,.0f} MiB{held / alone:>13.2f}"
                f"{sent / MIB:>10,.1f} MiB{expected / MIB:>10,.1f} MiB"
            )


if __name__ == "__main__":
    main()
