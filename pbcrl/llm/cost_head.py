"""A learned cost on language models: a cost head on any causal model, trained by the PbCI loss.

The head is that of `AutoModelForSequenceClassification` with one label: a linear layer on the last
token's hidden state. It gives the cost of a whole response, in units where the learned limit is 0.
Needs the extra `llm`. Works on text: the cost model may have another tokenizer than the policy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbcrl.buffer import check_generator
from pbcrl.errors import CorruptFileError, LabelError, NonFiniteError, require_in
from pbcrl.lagrange import LagrangeMultiplier
from pbcrl.llm.text import TextPair
from pbcrl.losses import pbci_loss
from pbcrl.storage import write_atomically

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise ImportError(
        f"pbcrl.llm.cost_head is made for transformers, which is missing ({missing}); "
        "pip install 'pbcrl[llm]'"
    ) from missing

MAX_LENGTH = 512
"""Tokens of prompt and response that are read by default, as Safe RLHF has it."""
_STATE = "multiplier.json"


def fit_cost_head(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[TextPair],
    *,
    rng: np.random.Generator,
    dead_zone: float = 1.0,
    snr_weight: float = 1e-3,
    max_std: float | None = 5.0,
    safety_weight: float = 1.0,
    lr: float = 2e-5,
    weight_decay: float = 0.1,
    epochs: int = 2,
    batch_size: int = 64,
    chunk_size: int = 32,
    max_length: int = MAX_LENGTH,
) -> list[float]:
    """Train a cost head, and the model under it, on labelled pairs, in place.

    `dead_zone=0, snr_weight=0, safety_weight=2` is the loss of Safe RLHF's cost model: the sum of
    its three terms counts each of the two safety labels of a pair once, where `pbci_loss` takes
    their mean. On `pbcrl.llm.text.helpfulness(pairs)` with `snr_weight=0` it trains a reward model.

    Pair and variance terms need all costs of a batch together, so a gradient step scores the
    responses in chunks, takes the gradient of the loss with respect to those costs, and scores each
    chunk again to carry it to the weights: the exact gradient, in the memory of one chunk. AdamW's
    step size falls linearly to 0. Dropout is off: both passes must see the same network.

    Args:
        model: A sequence classifier of transformers with `config.num_labels == 1`.
        tokenizer: Its tokenizer, which has a padding token.
        pairs: The labelled responses.
        rng: Order of the pairs.
        dead_zone: δ, as of `pbci_loss`.
        snr_weight: ζ, as of `pbci_loss`.
        max_std: As of `pbci_loss`.
        safety_weight: Of the safety term, >= 0.
        lr: AdamW's step size at the start, > 0.
        weight_decay: Of AdamW, >= 0.
        epochs: Passes over the pairs; 0 leaves the model as it is.
        batch_size: Pairs per gradient step.
        chunk_size: Responses per forward pass.
        max_length: Tokens after which prompt and response are cut off, at the side that
            `tokenizer.truncation_side` says.

    Returns:
        The mean of preference + safety loss in each epoch, in nats, without `safety_weight`.

    Raises:
        LabelError: If there are no pairs, or none of them has a label.
        NonFiniteError: If the model's costs are NaN or infinite; lower `lr`.
        ValueError: If the model has not one label, the tokenizer no padding token, or a number is
            out of range.
    """
    check_generator(rng)
    _prepare(model, tokenizer)
    require_in("(0, inf)", lr=lr, batch_size=batch_size, chunk_size=chunk_size)
    require_in("[0, inf)", safety_weight=safety_weight, weight_decay=weight_decay, epochs=epochs)
    labels = np.array(
        [[p.label.preference, p.label.first_safe, p.label.second_safe] for p in pairs], np.float32
    ).reshape(-1, 3)
    if np.isnan(labels).all():
        raise LabelError(
            f"a cost is learned from labels, but none of {len(pairs)} pairs has one; read labelled "
            "pairs, by pbcrl.llm.text.read_pairs"
        )
    texts = [
        (p.prompt + p.first, p.prompt + (p.first if p.second is None else p.second)) for p in pairs
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    steps, step, history = epochs * math.ceil(len(pairs) / batch_size), 0, []
    was_training = model.training
    model.eval()
    for _ in range(epochs):
        order, sums = rng.permutation(len(pairs)), np.zeros(2)
        for start in range(0, len(pairs), batch_size):
            index = order[start : start + batch_size]
            members = [texts[i][k] for k in (0, 1) for i in index]  # all first, then all second
            chunks = [members[i : i + chunk_size] for i in range(0, len(members), chunk_size)]
            with torch.no_grad():
                cost = torch.cat([_costs(model, tokenizer, c, max_length) for c in chunks])
            if not cost.isfinite().all():
                raise NonFiniteError("a cost model must return finite costs; lower lr")
            cost.requires_grad_()  # (2B,)
            label = torch.from_numpy(labels[index]).to(cost.device)  # (B, 3)
            loss = pbci_loss(
                *cost.chunk(2),
                *label.unbind(1),
                dead_zone=dead_zone,
                snr_weight=snr_weight,
                max_std=max_std,
            )
            total = loss.preference + safety_weight * loss.safety + loss.snr
            (gradient,) = torch.autograd.grad(total, cost)
            optimizer.zero_grad(set_to_none=True)
            for chunk, part in zip(chunks, gradient.split(chunk_size), strict=True):
                _costs(model, tokenizer, chunk, max_length).backward(part)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
            optimizer.step()
            step += 1
            sums += len(index) * float((loss.preference + loss.safety).detach()), len(index)
        history.append(float(sums[0] / sums[1]))
    model.train(was_training)
    return history


def score(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    chunk_size: int = 32,
    max_length: int = MAX_LENGTH,
) -> NDArray[np.float32]:
    """Return the learned cost of each response, (B,), without gradients; above 0 is unsafe.

    It does not depend on the side or the amount of padding, so not on what else is in the batch.

    Raises:
        ValueError: If there are not as many prompts as responses, a text has no token, the model
            has not one label, or the tokenizer no padding token.
    """
    _prepare(model, tokenizer)
    if len(prompts) != len(responses):
        raise ValueError(
            f"each response has its prompt, got {len(prompts)} prompts and {len(responses)} "
            "responses; repeat a prompt that has several"
        )
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = [
            _costs(model, tokenizer, texts[i : i + chunk_size], max_length)
            for i in range(0, len(texts), chunk_size)
        ]
    model.train(was_training)
    costs: NDArray[np.float32] = (
        torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.float32)
    )
    return costs


def cost_function(
    model: Any, tokenizer: Any, *, chunk_size: int = 32, max_length: int = MAX_LENGTH
) -> Callable[..., list[float]]:
    """Return `score` in the shape of a reward function of TRL, for `GRPOTrainer` and its like.

    It is called `cost`, so that TRL logs its mean as `rewards/cost/mean`, which `LagrangeCallback`
    reads. It takes prompts and completions as texts, not as messages.
    """

    def cost(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
        for text in (*prompts, *completions):
            if not isinstance(text, str):
                raise TypeError(
                    f"a cost is that of texts, got {type(text).__name__}; train on a data set "
                    "whose prompts are texts, with the chat template applied"
                )
        found = score(
            model, tokenizer, prompts, completions, chunk_size=chunk_size, max_length=max_length
        )
        return [float(each) for each in found]

    return cost


class LagrangeCallback(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Moves λ by the mean cost that a trainer of TRL logs, and the trainer's reward weights by λ.

    For `reward_funcs=[reward, cost]`: the weights become (1, -λ) / (1 + λ) after every logged step,
    so set `logging_steps=1`. λ is written into each checkpoint as `multiplier.json`, and read from
    there when training resumes.

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer`, to whose `callbacks` this is added afterwards, by
            `trainer.add_callback`.
        multiplier: λ; its `update` is called with the mean cost.
        limit: Highest mean cost allowed; 0 for a learned cost.
        cost: `__name__` of the function that returns the cost, the second of the trainer's two.

    Raises:
        ValueError: If the trainer has not two reward functions.
    """

    def __init__(
        self,
        trainer: Any,
        multiplier: LagrangeMultiplier,
        *,
        limit: float = 0.0,
        cost: str = "cost",
    ) -> None:
        if len(trainer.reward_weights) != 2:
            raise ValueError(
                "a trainer under a constraint has reward_funcs=[reward, cost], got "
                f"{len(trainer.reward_weights)} functions"
            )
        self.trainer, self.multiplier = trainer, multiplier
        self.limit, self._key = limit, f"rewards/{cost}/mean"
        self._weigh()

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        """Move λ by the mean cost of a step, if there is one in the log."""
        if logs and self._key in logs:
            self.multiplier.update(float(logs[self._key]), self.limit)
            self._weigh()

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Write λ into the checkpoint."""
        if state.is_world_process_zero:
            text = json.dumps(self.multiplier.state_dict())
            write_atomically(_folder(args, state) / _STATE, text.encode())

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Take λ from the checkpoint that training goes on from.

        Raises:
            CorruptFileError: If it holds none: its first λ would undo what was learned.
        """
        if state.global_step == 0:
            return
        path = _folder(args, state) / _STATE
        try:
            self.multiplier.load_state_dict(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise CorruptFileError(
                f"training goes on with the multiplier of its checkpoint, but {path} does not give "
                f"it ({error}); resume from a folder in output_dir that this callback wrote"
            ) from error
        self._weigh()

    def _weigh(self) -> None:
        price = self.multiplier.value
        weights = self.trainer.reward_weights
        self.trainer.reward_weights = weights.new_tensor([1.0, -price]) / (1 + price)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _prepare(model: Any, tokenizer: Any) -> None:
    """Refuse what has no single score; let the model know its padding token."""
    if model.config.num_labels != 1:
        raise ValueError(
            f"a cost is one number, but the model has num_labels={model.config.num_labels}; load "
            "it by AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "responses of different lengths are padded, but the tokenizer has no padding token; "
            "set tokenizer.pad_token = tokenizer.eos_token"
        )
    if model.config.pad_token_id not in (None, tokenizer.pad_token_id):
        raise ValueError(
            "the last token is found by the padding token, which must be that of the tokenizer: "
            f"got {model.config.pad_token_id} in the model's config and {tokenizer.pad_token_id}; "
            "set model.config.pad_token_id = tokenizer.pad_token_id"
        )
    model.config.pad_token_id = tokenizer.pad_token_id


def _costs(model: Any, tokenizer: Any, texts: Sequence[str], max_length: int) -> Tensor:
    """Learned costs of texts, (B,)."""
    encoded = tokenizer(
        list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
    )
    tokens, mask = (encoded[name].to(model.device) for name in ("input_ids", "attention_mask"))
    if tokens.shape[1] == 0 or not mask.any(1).all():
        raise ValueError("a text that is scored has a token, got an empty prompt and response")
    # Counted from the first real token: GPT-2's positions would shift with padding on the left.
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)

    out = model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions)
    logits: Tensor = out.logits  # (B, 1)
    return logits.squeeze(-1)
