"""Make the README's picture of a report: `python docs/picture.py` writes docs/_static/report.png.

It trains a small language model to repeat random sequences, follows its circuits with CircuitProbe, and has Chromium
(chromium, chromium-browser or google-chrome on the path) draw the top of the report.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from qkov.probes import CircuitProbe
from qkov.reports.pages.run_report import write_run_report

PICTURE = Path(__file__).parent / "_static" / "report.png"
STEPS, EVERY, BATCH, LENGTH, VOCABULARY = 2500, 50, 32, 10, 24


def train(store: Path) -> None:
    """Train the model and write the store of its circuits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=VOCABULARY, n_positions=2 * LENGTH, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    circuits = CircuitProbe(model, store=str(store), every=EVERY)
    for step in range(STEPS):
        half = torch.randint(VOCABULARY, (BATCH, LENGTH))
        tokens = torch.cat([half, half], dim=1)
        # Only the repetition can be predicted.
        labels = tokens.clone()
        labels[:, : LENGTH + 1] = -100
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        circuits.step(loss)
        optimizer.zero_grad()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


def main() -> int:
    """Make the picture."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium on the path; install it and run this again", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "repetition"
        train(store)
        report = write_run_report([store], store / "report.html", command="qkov report repetition")
        subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--window-size=1200,1225", f"--screenshot={PICTURE}", report.resolve().as_uri()),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    print(f"picture: {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
