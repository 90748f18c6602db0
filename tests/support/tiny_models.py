"""Tiny random models with a tokenizer and a chat template, made in memory.

On the tests' path (`pythonpath` in pyproject.toml): what several conftest files share.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from criticalkv.shared.model.attention import IMPLEMENTATION
from criticalkv.shared.model.chat import ChatTemplate, tokenizer_digest
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.model.spec import check_supported, spec_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3_text": Gemma3TextConfig,
    "phi3": Phi3Config,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    # Sliding, full, sliding, …; logits scaled otherwise than by the head's dimension.
    "gemma3_text": {
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 4,
    },
    # Its own default lies beyond a tiny vocabulary.
    "phi3": {"pad_token_id": 0},
}


def byte_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, and ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(
    family: str = "llama",
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    num_layers: int = 3,
    seed: int = 0,
    **extra: Any,
) -> LoadedModel:
    """A random model whose attention is peaked and whose logits spread."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    config: PreTrainedConfig = CONFIGS[family](
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        **(DEFAULTS.get(family, {}) | extra),
    )
    check_supported(config)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=IMPLEMENTATION, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 3.0 if "q_proj" in name or "k_proj" in name else 1.5
                weight.normal_(0, gain / weight.shape[1] ** 0.5)
            if "qkv_proj" in name:
                weight[: (num_q_heads + num_kv_heads) * head_dim] *= 2
    spec = spec_of(
        config,
        name=f"tiny-{family}",
        path="",
        model_digest=f"{seed:064x}",
        tokenizer_digest=tokenizer_digest(tokenizer),
        dtype="float32",
        device="cpu",
    )
    return LoadedModel(spec, model, tokenizer, ChatTemplate(tokenizer))
