"""A learned cost on language models: a cost head on any of them, trained by the PbCI loss.

The head is that of `AutoModelForSequenceClassification` with one label: a linear layer on the last
token's hidden state, or, of an encoder such as BERT, on what that model pools. It gives the cost of
a whole response, in units where the learned limit is 0.
Needs the extra `llm`. Works on text: the cost model may have another tokenizer than the policy.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
_TOKENIZED_AT_ONCE = 1024
# Heads of transformers 5.23: XLNet reads the last place, be it padding; the others mix it in.
_READ_PADDING = "convbert", "fnet", "nystromformer", "xlnet", "yoso"


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
        model: A sequence classifier of transformers with `config.num_labels == 1`. What is trained
            of it is float32: at a weight of 0.02, bfloat16 has a number every 1.2e-4, and a step of
            the default `lr` is 2e-5. To compute in bfloat16, call this under `torch.autocast`.
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
        max_length: Tokens of a prompt and its response that are read at most: a longer prompt
            loses its beginning, whatever `tokenizer.truncation_side` says. A response that is
            longer by itself loses its own, with a warning.

    Returns:
        The mean of preference + safety loss in each epoch, in nats, without `safety_weight`.

    Raises:
        LabelError: If there are no pairs, or none of them has a label.
        NonFiniteError: If the model's costs are NaN or infinite; lower `lr`.
        ValueError: If the model has not one label, weights to train in less than float32, or reads
            padding; if the tokenizer has no padding token, a text has no token, or a number is out
            of range.
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
    _check_precision(model)
    prompts = [p.prompt for p in pairs]
    tokens = [
        _tokens(tokenizer, prompts, responses, max_length)
        for responses in (
            [p.first for p in pairs],
            [p.first if p.second is None else p.second for p in pairs],
        )
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    steps, step, history = epochs * math.ceil(len(pairs) / batch_size), 0, []
    was_training = model.training
    model.eval()
    for _ in range(epochs):
        order, sums = rng.permutation(len(pairs)), np.zeros(2)
        for start in range(0, len(pairs), batch_size):
            index = order[start : start + batch_size]
            members = [tokens[k][i] for k in (0, 1) for i in index]  # all first, then all second
            chunks = [members[i : i + chunk_size] for i in range(0, len(members), chunk_size)]
            with torch.no_grad():
                cost = torch.cat([_costs(model, chunk) for chunk in chunks])
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
                _costs(model, chunk).backward(part)
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

    It does not depend on the side or the amount of padding, so not on what else is in the batch. A
    model of any precision will do. `max_length` is as of `fit_cost_head`.

    Raises:
        ValueError: If there are not as many prompts as responses, a text has no token, the model
            has not one label or reads padding, or the tokenizer has no padding token.
    """
    _prepare(model, tokenizer)
    if len(prompts) != len(responses):
        raise ValueError(
            f"each response has its prompt, got {len(prompts)} prompts and {len(responses)} "
            "responses; repeat a prompt that has several"
        )
    tokens = _tokens(tokenizer, prompts, responses, max_length)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = [
            _costs(model, tokens[i : i + chunk_size]) for i in range(0, len(tokens), chunk_size)
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
    if model.config.model_type in _READ_PADDING:
        raise ValueError(
            "a cost does not depend on what else is in the batch, but that of a model of type "
            f"{model.config.model_type!r} does, by the padding; take another one, such as a Llama "
            "or a BERT"
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


def _check_precision(model: Any) -> None:
    found = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    if coarse := [dtype for dtype in found if torch.finfo(dtype).bits < 32]:
        raise ValueError(
            "a cost head is learned in small steps, which a weight of less than float32 rounds "
            f"away, got {coarse[0]}; call model.float() before, or load it by from_pretrained(..., "
            "dtype=torch.float32)"
        )


def _tokens(
    tokenizer: Any, prompts: Sequence[str], responses: Sequence[str], max_length: int
) -> list[Tensor]:
    """The last tokens of each prompt and its response, int32 (T,), T <= max_length."""
    cutting = copy.copy(tokenizer)
    cutting.truncation_side = "left"  # the prompt's: on the right is what is to be scored
    room = max_length - tokenizer.num_special_tokens_to_add()
    found, num_cut = [], 0
    for start in range(0, len(prompts), _TOKENIZED_AT_ONCE):
        part = slice(start, start + _TOKENIZED_AT_ONCE)
        texts = [p + r for p, r in zip(prompts[part], responses[part], strict=True)]
        rows = cutting(texts, truncation=True, max_length=max_length)["input_ids"]
        found += [torch.tensor(row, dtype=torch.int32) for row in rows]
        full = [r for r, row in zip(responses[part], rows, strict=True) if len(row) == max_length]
        alone = (
            tokenizer(full, add_special_tokens=False, verbose=False)["input_ids"] if full else []
        )
        num_cut += sum(len(row) > room for row in alone)
    if not all(map(len, found)):
        raise ValueError("a text that is scored has a token, got an empty prompt and response")
    if num_cut:
        warnings.warn(
            f"a response is read whole, but {num_cut} of {len(found)} have more than "
            f"max_length={max_length} tokens, and only their ends are read; raise max_length, or "
            "leave them out",
            UserWarning,
            stacklevel=3,
        )
    return found


def _costs(model: Any, chunk: Sequence[Tensor]) -> Tensor:
    """Learned costs of texts, of their tokens; float32 (B,)."""
    # At the end, whatever the tokenizer's side: there no model's positions or pooling are moved.
    tokens = pad_sequence(list(chunk), batch_first=True, padding_value=model.config.pad_token_id)
    lengths = torch.tensor([[len(row)] for row in chunk])
    mask = torch.arange(tokens.shape[1]) < lengths
    # A caller's autocast keeps its copies of the weights until he leaves it: a fit within it would
    # compute with the weights of its beginning all through.
    kind = model.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, dtype, enabled, cache_enabled=False):
        out = model(
            input_ids=tokens.long().to(model.device), attention_mask=mask.long().to(model.device)
        )
    logits: Tensor = out.logits  # (B, 1)
    return logits.squeeze(-1).float()
