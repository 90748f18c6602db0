"""Load a model's weights, ready to run by plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from criticalkv.shared.cache.wire import TORCH_DTYPE
from criticalkv.shared.config import ModelConfig
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.malloc import tune_malloc
from criticalkv.shared.model.attention import IMPLEMENTATION
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.model.spec import ModelSpec, load_spec, load_tokenizer, rope_parameters

# Of the free memory, for the weights; the rest is for activations and KV.
GPU_SHARE = 0.9


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory with its tokenizer and chat template."""

    spec: ModelSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatTemplate

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.model.device)

    def w_o(self, layer: int) -> Tensor:
        """Output projection of a layer, [hidden_size, num_q_heads * head_dim]."""
        weight: Tensor = self.model.model.layers[layer].self_attn.o_proj.weight
        return weight.detach()

    def rotation(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's RoPE: cos and sin at int64 [p] positions.

        Returns:
            fp32 [p, rotary_dim] each; rotary_dim ≤ head_dim, the first that RoPE turns.
        """
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        # Where layers differ in RoPE, transformers wants to know which type is meant.
        shared = None in rope_parameters(self.model.config)
        kind = () if shared else (self.model.config.layer_types[layer],)
        cos, sin = self.model.model.rotary_emb(like, positions[None].to(self.device), *kind)
        return cos[0], sin[0]


def load_model(config: ModelConfig, threads: int | None = None) -> LoadedModel:
    """Load a model onto one device.

    Args:
        config: which model.
        threads: torch threads of this process on CPU; None leaves them alone.

    Raises:
        ConfigError: if the weights do not fit on the GPU (one GPU per replica).
        ModelNotFoundError, UnsupportedModelError: as load_spec.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    spec = load_spec(config)
    if spec.device == "cuda":
        _check_fits(spec)
    else:
        tune_malloc()  # blocks of logits and activations come and go
    model = AutoModelForCausalLM.from_pretrained(
        spec.path, dtype=TORCH_DTYPE[spec.dtype], attn_implementation=IMPLEMENTATION
    )
    tokenizer = load_tokenizer(spec)
    return LoadedModel(spec, model.to(spec.device).eval(), tokenizer, ChatTemplate(tokenizer))


def _check_fits(spec: ModelSpec) -> None:
    needed = _parameters(spec) * TORCH_DTYPE[spec.dtype].itemsize
    free, _ = torch.cuda.mem_get_info()
    if needed > free * GPU_SHARE:
        raise ConfigError(
            f"{spec.name} has {needed / 2**30:.1f} GiB of weights but the GPU has "
            f"{free / 2**30:.1f} GiB free; a replica uses exactly one GPU",
            param="model.path",
        )


def _parameters(spec: ModelSpec) -> int:
    """Count them by the files' headers: the files' own dtype may not be the loaded one."""
    count = 0
    for path in Path(spec.path).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count
