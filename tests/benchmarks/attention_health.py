"""Count what alarms of growing scores foresee, and which runs a guard brings back: 20 runs from safe to fatal rates.

Run as `python -m tests.benchmarks.attention_health [steps]`, which takes about 8 minutes of one core. A GPT-2 of two
layers, d_model 64 and four heads learns to repeat blocks of random tokens, with AdamW and gradients clipped to norm 1,
from the same start and on the same batches. Ten runs raise the rate of W_Q and W_K alone (`CircuitRates`), and ten the
rate of everything. Each is trained alone, with a guard of 100 by lower rates, and with a guard of 100 by QK-clip.

An alarm is a score whose growth passes 100 within 100 steps: from half of the limit on, as is the default, and from 0
on. A loss departs at the first of 20 steps in a row in which it is above 1.1 times the loss of the safe run at the same
step. The lead is the number of steps from the first alarm to the departure.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from qkov.probes import AttentionHealth, CircuitRates

BASE, LIMIT, HORIZON = 3e-3, 100.0, 100
FACTOR, IN_A_ROW = 1.1, 20
WORDS, BATCH, BLOCK = 32, 32, 12
#: The rate of everything and that of W_Q and W_K, as multiples of the safe ones; the first run is the safe one.
RATES = [(1.0, qk) for qk in (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 35.0, 60.0, 100.0)]
RATES += [(rate, 1.0) for rate in (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0, 30.0)]


@dataclass(frozen=True, eq=False)
class Run:
    """What became of a run.

    Attributes:
        losses: The loss of each step.
        scores: The largest score of any head in each step.
        entropies: The smallest mean entropy of any head.
        norms: The norm of the gradients.
        alarm: The first step with an alarm; None if there was none.
        early: The same, had small scores given alarms too.
    """

    losses: list[float]
    scores: list[float]
    entropies: list[float]
    norms: list[float]
    alarm: int | None
    early: int | None


def build(width: int = 64) -> Any:
    """The model, always the same."""
    torch.manual_seed(0)
    sizes: Any = {"n_layer": 2, "n_head": 4, "n_embd": width, "n_positions": 2 * BLOCK, "vocab_size": WORDS}
    drops: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Blocks of different random tokens, each twice; always the same."""
    generator = np.random.default_rng(1)
    for _ in range(steps):
        blocks = np.stack([generator.permutation(WORDS)[:BLOCK] for _ in range(BATCH)])
        yield torch.from_numpy(np.concatenate([blocks, blocks], axis=1))


def train(rate: float, qk: float, steps: int, *, repeats_alone: bool = False, **guard: Any) -> Run:
    """Train a model and watch it.

    Args:
        rate: The rate of everything, as a multiple of the base.
        qk: The rate of W_Q and W_K on top of it.
        steps: The number of steps.
        repeats_alone: Whether the loss is that of the tokens that can be known alone.
        **guard: Arguments of the guard.
    """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), rate * BASE, weight_decay=0.01)
    losses, norms = [], []
    with ExitStack() as stack:
        rates = stack.enter_context(CircuitRates(optimizer, model, qk=qk, **guard))
        # A guard sees what AttentionHealth would see.
        options: Any = {"limit": LIMIT, "horizon": HORIZON, "kept": steps, "tell": None}
        health = rates.guard if guard else stack.enter_context(AttentionHealth(model, optimizer, **options))
        for tokens in batches(steps):
            labels = tokens.clone()
            if repeats_alone:
                labels[:, : BLOCK + 1] = -100
            loss = model(tokens, labels=labels).loss
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        table, alarms = health.table(), health.alarms
    of_step = table.groupby("step")
    in_danger = table[table["passes_at"] <= table["step"] + HORIZON]
    return Run(
        losses,
        of_step["max_logit"].max().tolist(),
        of_step["entropy"].min().tolist(),
        norms,
        alarms[0].step if alarms else None,
        int(in_danger["step"].min()) if len(in_danger) else None,
    )


def departure(losses: list[float], safe: list[float]) -> int | None:
    """The first of 20 steps in a row in which a loss is above 1.1 times the safe one, or is not a number."""
    row = 0
    for step, (loss, of_safe) in enumerate(zip(losses, safe, strict=True), 1):
        row = 0 if loss <= FACTOR * of_safe else row + 1
        if row == IN_A_ROW:
            return step - IN_A_ROW + 1
    return None


def ending(losses: list[float], safe: list[float]) -> float:
    """The mean loss of the last 20 steps as a multiple of the safe run's."""
    return statistics.fmean(losses[-IN_A_ROW:]) / statistics.fmean(safe[-IN_A_ROW:])


def main() -> None:
    """Print a line for each rate, and what they say together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=250)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    started = time.process_time()
    at = min(60, steps)
    print(f"torch {torch.__version__}, 1 thread, {steps} steps, base rate {BASE:g}, limit {LIMIT:g}")
    print(
        f"| rate | of QK | score at {at} | entropy at {at} | loss at {at} | gradient at {at} | alarm | alarm from 0 | "
        f"passes {LIMIT:g} | departs | lead | ends at | with lower rates | with clip |"
    )
    print("|---" * 14 + "|")
    safe: list[float] = []
    rows = []
    for rate, qk in RATES:
        alone = train(rate, qk, steps)
        safe = safe or alone.losses
        guarded = [train(rate, qk, steps, guard=LIMIT, guard_by=by) for by in ("rate", "clip")]
        departs = departure(alone.losses, safe)
        passes = next((step for step, score in enumerate(alone.scores, 1) if score > LIMIT), None)
        lead = None if departs is None or alone.alarm is None else departs - alone.alarm
        ends = [ending(run.losses, safe) for run in (alone, *guarded)]
        rows.append((alone, departs, passes, lead, ends, [departure(run.losses, safe) for run in guarded]))
        cells = [f"{rate:g}", f"{qk:g}", f"{alone.scores[at - 1]:.1f}", f"{alone.entropies[at - 1]:.2f}"]
        cells += [f"{alone.losses[at - 1] / safe[at - 1]:.2f}", f"{alone.norms[at - 1]:.2f}"]
        cells += ["-" if value is None else str(value) for value in (alone.alarm, alone.early, passes, departs, lead)]
        cells += [f"{end:.2f}" for end in ends]
        print(f"| {' | '.join(cells)} |", flush=True)
    departed = [row for row in rows if row[1] is not None]
    calm = [row for row in rows if row[1] is None]
    print(f"\n{len(departed)} of {len(rows)} runs depart.")
    for name, first in (("half of the limit", lambda run: run.alarm), ("0", lambda run: run.early)):
        leads = [row[1] - first(row[0]) for row in departed if first(row[0]) is not None and first(row[0]) < row[1]]
        false = [row for row in calm if first(row[0]) is not None]
        true_of_score = sum(row[2] is not None for row in false)
        middle = f"{statistics.median(leads):g} steps before (median; {min(leads)} to {max(leads)})" if leads else "-"
        print(
            f"Alarms from {name} on: {len(leads)} of {len(departed)} departures foreseen, {middle}; "
            f"{len(departed) - len(leads)} missed; {len(false)} of {len(calm)} runs that do not depart give an alarm, "
            f"{true_of_score} of which pass the limit."
        )
    for number, name in ((0, "lower rates"), (1, "clip")):
        back = sum(row[4][1 + number] <= FACTOR for row in departed)
        harmed = sum(row[5][number] is not None for row in calm)
        print(
            f"Guard by {name}: {back} of {len(departed)} departed runs end under {FACTOR:g}; {harmed} of {len(calm)} "
            f"that do not depart alone depart with it."
        )
    print(f"{(time.process_time() - started) / 60:.1f} minutes of CPU time.")


if __name__ == "__main__":
    main()
