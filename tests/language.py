"""Tiny language models with random weights, and tokenizers that are made without any download."""

from functools import cache

import pytest

transformers = pytest.importorskip("transformers", reason="pbcrl.llm.cost_head needs transformers")

FAMILIES = "qwen2", "llama", "gpt2", "opt"
ENCODERS = "bert", "roberta", "deberta-v2", "modernbert"
"""Models that read a text in both directions."""


@cache
def byte_tokenizer(padding_side="right"):
    """Every byte is a token; as files of a model would give it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = ["<pad>", "<eos>"]
    vocab = {letter: i for i, letter in enumerate([*ends, *letters])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side=padding_side,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(family, **changes):
    tokenizer = byte_tokenizer()
    common = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    if family == "gpt2":
        return transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=2, n_positions=256, **common, **changes
        )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "opt":
        return transformers.OPTConfig(
            ffn_dim=64, word_embed_proj_dim=32, **sizes, **common, **changes
        )
    sizes["intermediate_size"] = 64
    if family in (*ENCODERS, "fnet"):
        common |= {"cls_token_id": None, "sep_token_id": None, "initializer_range": 0.2}
        return transformers.AutoConfig.for_model(family, **sizes, **common, **changes)
    make = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}[family]
    return make(**sizes, num_key_value_heads=2, **common, **changes)


def cost_head(family, seed=0, **changes):
    """A cost head on a random model of a family."""
    transformers.set_seed(seed)
    config = tiny_config(family, num_labels=1, **changes)
    return transformers.AutoModelForSequenceClassification.from_config(config)
