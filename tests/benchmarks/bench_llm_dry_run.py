"""A dry run of `ppo_lag_llm.py` on a real model's size: GPT-2's, with random weights.

Makes the model, a tokenizer of bytes and rows in the Safe-RLHF schema, then runs two updates of the
script as a user would, and one gradient step of the cost head, each in a process of its own. Prints
peak memory and seconds, of the processor too, since others may be at work on it. What the policy
writes is noise: this shows that the way is whole.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

SCRIPT = Path(__file__).parents[2] / "cleanrl_scripts" / "ppo_lag_llm.py"


@dataclass(frozen=True)
class Args:
    rows: int = 1_000
    """labelled pairs in the file"""
    cost_epochs: int = 0
    """passes over them by the reward and the cost model, which take much longer than all else"""
    layers: int = 12
    """of the model, 768 wide; 12 are GPT-2"""
    batch_size: int = 8
    """responses per update"""
    runs_dir: str = "runs/dry_run"
    """folder of everything"""


def write_model(folder: Path, layers: int) -> int:
    """Save a random model with its tokenizer; return its number of parameters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    config = GPT2Config(n_layer=layers, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = GPT2LMHeadModel(config)  # with GPT-2's 50,257 tokens, of which few are used
    model.save_pretrained(folder)
    return int(model.num_parameters())


def write_rows(path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    words = np.array(["open", "the", "lock", "call", "break", "ask", "no", "yes"])
    with path.open("w") as file:
        for _ in range(count):
            prompt, first, second = (" ".join(rng.choice(words, 4)) for _ in range(3))
            safer = int(rng.random() < 0.5)
            row = {
                "prompt": prompt,
                "response_0": first,
                "response_1": f"{second}.",
                "is_response_0_safe": safer == 0,
                "is_response_1_safe": safer == 1,
                "better_response_id": int(rng.random() < 0.5),
                "safer_response_id": safer,
            }
            file.write(json.dumps(row) + "\n")


STEP = """
import sys, time, numpy as np
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from pbcrl.llm import fit_cost_head
from pbcrl.text import read_pairs
folder, data = sys.argv[1:]
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
pairs = read_pairs(data, rng=np.random.default_rng(0))[:8]
start = time.process_time()
options = {"batch_size": 8, "chunk_size": 4, "epochs": 1, "rng": np.random.default_rng(0)}
fit_cost_head(model, AutoTokenizer.from_pretrained(folder), pairs, **options)
print(time.process_time() - start)
"""


def main(args: Args) -> None:
    folder = Path(args.runs_dir).resolve()
    model, data = folder / "model", folder / "rows.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    parameters = write_model(model, args.layers)
    write_rows(data, args.rows)
    name = f"run{int(time.time())}"
    options = {
        "--model": model,
        "--data": data,
        "--template": "{prompt}: ",
        "--num-iterations": 2,
        "--batch-size": args.batch_size,
        "--minibatch-size": 4,
        "--chunk-size": 4,
        "--update-epochs": 1,
        "--max-new-tokens": 16,
        "--max-length": 64,
        "--learning-rate": 1e-5,
        "--cost-lr": 2e-5,
        "--cost-epochs": args.cost_epochs,
        "--cost-batch-size": 8,
        "--eval-episodes": args.batch_size,
        "--runs-dir": folder,
        "--run-name": name,
    }
    command = [
        sys.executable,
        str(SCRIPT),
        *(str(word) for pair in options.items() for word in pair),
    ]
    start = time.perf_counter()
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20  # KiB to GiB
    print(
        f"{parameters / 1e6:.0f}M parameters, {args.rows} rows: {cpu:.0f} s of CPU, {seconds:.0f} s"
    )
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        parts = {key: round(value, 1) for key, value in row.items() if key.startswith("seconds_")}
        print(f"update after {row['env_steps']} responses of {row['length']:.0f} tokens: {parts}")
    print(f"peak memory {peak:.1f} GiB")
    step = [sys.executable, "-c", STEP, str(model), str(data)]
    found = subprocess.run(step, check=True, capture_output=True, text=True)
    print(f"a gradient step of the cost head on 8 pairs: {float(found.stdout):.1f} s of CPU")


if __name__ == "__main__":
    main(tyro.cli(Args))
