"""A tiny random model on disk: fast, offline, and never twice the same logits.

One token is one ASCII character, so that text and tokens tell the same, also where a
client resends an answer. Its attention is peaked: what was evicted changes the answer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNKNOWN = "<|unknown|>"
GAIN_ATTENTION = 3.0
GAIN = 1.5


def make_model(folder: Path, seed: int) -> Path:
    """Save a model with its tokenizer; return the folder.

    Args:
        folder: made if absent.
        seed: of the weights.
    """
    tokenizer = ascii_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    _draw(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per printable ASCII character."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "\n" + "".join(map(chr, range(32, 127)))
    alphabet = [split.pre_tokenize_str(char)[0][0] for char in text]
    vocabulary = {char: i for i, char in enumerate([*alphabet, UNKNOWN])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token=UNKNOWN,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _draw(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                peaked = "q_proj" in name or "k_proj" in name
                gain = GAIN_ATTENTION if peaked else GAIN
                weight.normal_(0, gain / weight.shape[1] ** 0.5, generator=generator)
