"""A dry run of `ppo_lag_llm.py` on a real model's size: GPT-2's, with random weights.

Makes the model, a tokenizer of words and rows in the Safe-RLHF schema, then runs the script as a
user would, in a process of its own: all rows are read, reward and cost model are fitted to some of
them, the policy learns from two rollouts, and everything is saved. Prints peak memory and seconds,
of the processor too, since others may be at work on it. What the policy writes is noise: this shows
that the way is whole.
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
    cost_pairs: int = 64
    """those that reward and cost model are fitted to, in gradient steps of 32"""
    layers: int = 12
    """of the model, 768 wide; 12 are GPT-2"""
    batch_size: int = 8
    """responses per update"""
    runs_dir: str = "runs/dry_run"
    """folder of everything"""


WORDS = "open", "the", "lock", "call", "break", "ask", "no", "yes"


def write_model(folder: Path, layers: int) -> int:
    """Save a random model with its tokenizer; return its number of parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    config = GPT2Config(n_layer=layers, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    words = ["<pad>", "<eos>", *WORDS]
    words += [f"word{i}" for i in range(len(words), config.vocab_size)]  # 50,257, as GPT-2
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def write_rows(path: Path, count: int) -> None:
    """Write pairs of responses of 5 words to prompts of 3, with random labels."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(count):
            prompt, first, second = (" ".join(rng.choice(WORDS, n)) for n in (3, 5, 5))
            safer = int(rng.random() < 0.5)
            row = {
                "prompt": prompt,
                "response_0": first,
                "response_1": second,
                "is_response_0_safe": safer == 0,
                "is_response_1_safe": safer == 1,
                "better_response_id": int(rng.random() < 0.5),
                "safer_response_id": safer,
            }
            file.write(json.dumps(row) + "\n")


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
        "--template": "{prompt} ",
        "--num-iterations": 2,
        "--batch-size": args.batch_size,
        "--minibatch-size": 4,
        "--chunk-size": 16,
        "--update-epochs": 1,
        "--max-new-tokens": 16,
        "--max-length": 64,
        "--learning-rate": 1e-5,
        "--cost-lr": 2e-5,
        "--cost-pairs": args.cost_pairs,
        "--cost-epochs": 1,
        "--cost-batch-size": 32,
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
    print(f"{parameters / 1e6:.0f}M parameters, {args.rows} rows")
    summary = json.loads((folder / name / "summary.json").read_text())
    stages = {stage: round(took) for stage, took in summary["stage_seconds"].items()}
    print(f"seconds of the stages: {stages}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        parts = {key: round(value, 1) for key, value in row.items() if key.startswith("seconds_")}
        print(f"update after {row['env_steps']} responses of {row['length']:.0f} tokens: {parts}")
    print(f"all: {seconds:.0f} s, {cpu:.0f} s of CPU, peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main(tyro.cli(Args))
