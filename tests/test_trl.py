"""TRL's own trainers under a constraint: reward and cost, priced by the multiplier's callback."""

import warnings

import numpy as np
import pytest

from .language import byte_tokenizer, cost_head, tiny_config, transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what TRL and its dependencies say of each other
    reason = "the recipes for TRL need trl and datasets, and they NumPy 2"
    trl = pytest.importorskip("trl", reason=reason, exc_type=ImportError)
    datasets = pytest.importorskip("datasets", reason=reason, exc_type=ImportError)
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from pbcrl import LagrangeMultiplier
from pbcrl.errors import CorruptFileError
from pbcrl.llm.cost_head import LagrangeCallback, cost_function

# FutureWarnings of transformers about TRL, and so on: theirs, not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
SPECIFIC = {"grpo": {"scale_rewards": "none"}, "rloo": {}}
each_kind = pytest.mark.parametrize("kind", TRAINERS)


def length(completions, **_):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder, as TRL wants it."""
    folder = tmp_path_factory.mktemp("policy")
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(folder)
    return str(folder)


def trainer_of(kind, policy, folder, *, multiplier, rewards=2, **changes):
    """A trainer on 8 prompts, with the callback; one optimizer step takes 4 completions."""
    make, config = TRAINERS[kind]
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        **SPECIFIC[kind],
        **changes,
    }
    trainer = make(
        model=policy,
        args=config(**options),
        reward_funcs=[length, cost_function(cost_head("llama"), byte_tokenizer("left"))][:rewards],
        train_dataset=datasets.Dataset.from_dict({"prompt": [f"question {i}: " for i in range(8)]}),
        processing_class=byte_tokenizer("left"),
    )
    trainer.add_callback(LagrangeCallback(trainer, multiplier, limit=-1.0))
    return trainer


def weights_of(trainer):
    return {k: v.detach().numpy().copy() for k, v in trainer.model.state_dict().items()}


@pytest.mark.slow
@each_kind
def test_the_multiplier_follows_the_mean_cost_that_trl_logs(kind, policy, tmp_path):
    multiplier = LagrangeMultiplier(lr=0.5, initial=1.0)
    trainer = trainer_of(kind, policy, tmp_path, multiplier=multiplier, save_steps=100)
    assert trainer.reward_weights.tolist() == [0.5, -0.5]
    before = weights_of(trainer)
    trainer.train()
    costs = [row["rewards/cost/mean"] for row in trainer.state.log_history if "loss" in row]
    assert len(costs) == 4
    expected = LagrangeMultiplier(lr=0.5, initial=1.0)
    for cost in costs:
        expected.update(cost, -1.0)
    assert multiplier.value == expected.value != 1.0
    price = multiplier.value
    np.testing.assert_allclose(
        trainer.reward_weights, np.array([1, -price]) / (1 + price), rtol=1e-6
    )
    assert any((before[name] != weight).any() for name, weight in weights_of(trainer).items())


@pytest.mark.slow
def test_a_resumed_trainer_goes_on_with_its_multiplier_to_the_last_bit(policy, tmp_path):
    through = trainer_of("grpo", policy, tmp_path / "a", multiplier=LagrangeMultiplier())
    through.train()
    trainer_of("grpo", policy, tmp_path / "b", multiplier=LagrangeMultiplier())
    multiplier = LagrangeMultiplier()
    again = trainer_of("grpo", policy, tmp_path / "a", multiplier=multiplier)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert again.state.global_step == 4
    (callback,) = (c for c in through.callback_handler.callbacks if isinstance(c, LagrangeCallback))
    assert multiplier.state_dict() == callback.multiplier.state_dict()
    for name, weight in weights_of(through).items():
        np.testing.assert_array_equal(weight, weights_of(again)[name])


@pytest.mark.slow
def test_a_checkpoint_without_its_multiplier_and_a_trainer_without_a_cost_are_refused(
    policy, tmp_path
):
    trainer_of("rloo", policy, tmp_path, multiplier=LagrangeMultiplier(), max_steps=2).train()
    path = tmp_path / "checkpoint-2"
    for damage in ('{"value": 1.0}', "{", None):
        if damage is None:
            (path / "multiplier.json").unlink()
        else:
            (path / "multiplier.json").write_text(damage)
        again = trainer_of("rloo", policy, tmp_path, multiplier=LagrangeMultiplier())
        with pytest.raises(CorruptFileError, match=r"multiplier\.json does not give it"):
            again.train(resume_from_checkpoint=str(path))
    with pytest.raises(ValueError, match=r"reward_funcs=\[reward, cost\], got 1"):
        trainer_of("rloo", policy, tmp_path, multiplier=LagrangeMultiplier(), rewards=1)
