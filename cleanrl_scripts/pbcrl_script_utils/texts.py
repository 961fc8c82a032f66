"""Language models, their prompts, and who judges responses: a token task, or a file of labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from pbcrl import Query, SyntheticOracle, Trajectory
from pbcrl.errors import LabelError, NonFiniteError
from pbcrl.llm.cost_head import fit_cost_head, score
from pbcrl.llm.text import TextPair, helpfulness, read_pairs
from pbcrl_envs.tokens import TokenTask


def load_model(kind: Any, folder: str | None, tokenizer: Any, device: str) -> Any:
    """Load a model, or make a small one with random weights; in float32, without dropout."""
    if folder is None:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=None,
            num_labels=1,
        )
        model = kind.from_config(config)
    else:
        labels = {} if kind is AutoModelForCausalLM else {"num_labels": 1}
        model = kind.from_pretrained(folder, dtype=torch.float32, **labels)
        model.config.pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval()  # what acts is what learns


def check_folders(args: Any) -> None:
    """Refuse models that are not on disk, or read fewer tokens than a script's arguments say.

    Raises:
        ValueError: If one is. Asked for a name that is no folder, transformers would download it.
    """
    for name in ("model", "reward_model", "cost_model"):
        folder, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if folder is None:
            continue
        if not (Path(folder) / "config.json").exists():
            raise ValueError(
                f"{flag} is a folder that save_pretrained has written, but {folder} has no "
                "config.json; nothing is downloaded here: save the model there first"
            )
        longest = getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", math.inf)
        if args.model is not None and args.max_length + args.max_new_tokens > longest:
            raise ValueError(
                f"a prompt and its response, --max-length + --max-new-tokens = {args.max_length} + "
                f"{args.max_new_tokens}, must fit into the {longest} tokens that {flag} reads; "
                "lower --max-length"
            )


def check_same_tokens(folder: str, tokenizer: Any) -> None:
    """Refuse a model with other tokens than the policy's: a critic that begins as it reads those.

    Raises:
        ValueError: If a token of `tokenizer` has another number in the folder, or none.
    """
    found = load_tokenizer(folder).get_vocab()
    if wrong := [word for word, i in tokenizer.get_vocab().items() if found.get(word) != i]:
        raise ValueError(
            "critics begin as the reward and the cost model and read the policy's tokens, but "
            f"{folder} numbers {len(wrong)} of them differently, such as {wrong[0]!r}; give a "
            "model with the policy's tokenizer, or leave it out to have one fitted"
        )


def load_tokenizer(folder: str) -> Any:
    """Load a tokenizer that pads and cuts off on the left, since responses are on the right."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", truncation_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def word_tokenizer(words: Sequence[str]) -> Any:
    """Make a tokenizer whose tokens are words, and a padding token."""
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", *words])}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


@dataclass(frozen=True)
class Scorer:
    """A cost or reward model with its tokenizer; `args` are a script's."""

    model: Any
    tokenizer: Any
    args: Any

    @classmethod
    def load(cls, folder: str | None, tokenizer: Any, args: Any) -> Scorer:
        """Load one, or put a new head on a causal model."""
        kind = AutoModelForSequenceClassification
        return cls(load_model(kind, folder, tokenizer, args.device), tokenizer, args)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray:
        """Return a cost or reward of each response, (B,).

        Raises:
            NonFiniteError: If one is NaN or infinite: then the model has diverged.
        """
        args = self.args
        options = {"chunk_size": args.chunk_size, "max_length": args.max_length}
        scores = score(self.model, self.tokenizer, prompts, responses, **options)
        if not np.isfinite(scores).all():
            raise NonFiniteError(
                "a cost or reward model must return finite numbers, but some are NaN or infinite: "
                f"it has diverged at a --cost-lr of {args.cost_lr:g}; lower it"
            )
        return scores

    def fit(self, pairs: Sequence[TextPair], **options: Any) -> None:
        """Train it, `options` are those of `fit_cost_head`."""
        args = self.args
        sizes = {"batch_size": args.cost_batch_size, "chunk_size": args.chunk_size}
        options |= {**sizes, "max_length": args.max_length, "lr": args.cost_lr}
        fit_cost_head(self.model, self.tokenizer, pairs, **options)


class World:
    """Where prompts and labels come from: the token task, or the file of a script's arguments."""

    def __init__(self, args: Any) -> None:
        self.task: TokenTask | None = None
        self.oracle: SyntheticOracle | None = None
        self.pairs: list[TextPair] = []
        """Labelled before training."""
        check_folders(args)
        rng = np.random.default_rng([args.seed, 1])  # its own: a resumed run has the same pairs
        if args.model is None:
            self.task = task = TokenTask(args.task, args.max_new_tokens)
            self.tokenizer = word_tokenizer(task.words)
            self.judge_tokenizer = word_tokenizer(task.judged_words)
            self.oracle = SyntheticOracle(task.cost_limit)
            if args.cost == "learned":
                prompts = 2 * task.prompts(args.offline_queries, rng)
                rates = rng.random(len(prompts))  # writers of all kinds
                texts = task.outcomes(task.responses(rates, rng), rng)
                self.pairs = self.label(prompts, texts, self.episodes(prompts, texts), rng)
        else:
            self.tokenizer = self.judge_tokenizer = load_tokenizer(args.model)
            reading = {"conflicts": args.conflicts, "template": args.template}
            self.pairs = read_pairs(args.data, rng=rng, **reading)
            if args.reward_model is None and not helpfulness(self.pairs[: args.cost_pairs]):
                raise LabelError(
                    f"a reward model is fitted to who is more helpful, but {args.data} does not "
                    "say it of any pair; give --reward-model, or rows with better_response_id"
                )
        for folder in filter(None, (args.reward_model, args.cost_model)):
            check_same_tokens(folder, self.tokenizer)

    def prompts(self, count: int, rng: np.random.Generator) -> list[str]:
        """Draw prompts."""
        if self.task is not None:
            return self.task.prompts(count, rng)
        return [self.pairs[i].prompt for i in rng.integers(len(self.pairs), size=count)]

    def decode(self, tokens: Tensor, is_written: Tensor) -> list[str]:
        """Return the texts of responses, the last tokens of (B, P + T), as far as `is_written`."""
        both = zip(tokens[:, -is_written.shape[1] :], is_written, strict=True)
        responses = [row[written] for row, written in both]
        texts: list[str] = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return texts

    def episodes(self, prompts: Sequence[str], texts: Sequence[str]) -> list[Trajectory]:
        """Responses as the oracle knows them, by the true cost of each word; none of a file."""
        if self.task is None:
            return []
        costs = [self.task.step_costs(*both) for both in zip(prompts, texts, strict=True)]
        blank = [np.zeros((len(each), 1), np.float32) for each in costs]
        return [Trajectory(row, row, each) for row, each in zip(blank, costs, strict=True)]

    def label(
        self,
        prompts: Sequence[str],
        texts: Sequence[str],
        episodes: Sequence[Trajectory],
        rng: np.random.Generator,
        most: int | None = None,
    ) -> list[TextPair]:
        """Have random pairs labelled that answer the same prompt, each response at most once."""
        waiting: dict[str, int] = {}
        pairs = []
        for i in rng.permutation(len(prompts)):
            if prompts[i] in waiting:
                pairs.append((waiting.pop(prompts[i]), i))
            else:
                waiting[prompts[i]] = i
        pairs = pairs[:most]
        assert self.oracle is not None  # of a token task
        labels = self.oracle.label([Query(episodes[i], episodes[j]) for i, j in pairs])
        both = zip(pairs, labels, strict=True)
        return [TextPair(prompts[i], texts[i], texts[j], label) for (i, j), label in both]
