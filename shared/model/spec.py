"""What a model is, read from its files without loading its weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from criticalkv.shared.config import ModelConfig, resolve_dtype
from criticalkv.shared.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from criticalkv.shared.model.chat import tokenizer_digest
from criticalkv.shared.model.demo import NAME as DEMO_NAME
from criticalkv.shared.model.demo import ensure_demo_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What transformers raises, beside OSError, for files that it cannot make sense of.
UNREADABLE = (
    ValueError,
    ImportError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    StrictDataclassError,
)
_VOLATILE = (
    "transformers_version",
    "_name_or_path",
    "_model_name_or_path",
    "dtype",
    "use_cache",
    "torch_dtype",
    "architectures",
)


@dataclass(frozen=True)
class ModelSpec:
    """A model's identity and shape.

    Attributes:
        name: name in the API.
        path: directory of the files.
        model_digest: sha256 of weights and configuration (volatile fields left out).
        tokenizer_digest: sha256 of tokenizer and chat template.
        dtype: "float32", "bfloat16" or "float16"; computation and KV.
        device: "cpu" or "cuda".
        sliding_windows: per layer the window in tokens, or None for full attention.
    """

    name: str
    path: str
    model_digest: str
    tokenizer_digest: str
    dtype: str
    device: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


def load_spec(config: ModelConfig, *, check_device: bool = True) -> ModelSpec:
    """Resolve a model and read what identifies it.

    Args:
        config: which model.
        check_device: whether this process must have the device: not if it only names nodes.

    Raises:
        ConfigError: if this process lacks the device.
        ModelNotFoundError: if the path or name leads to no local model.
        UnsupportedModelError: if the architecture cannot be served correctly.
    """
    path = resolve_path(config)
    hf = _read_config(path)
    check_supported(hf)
    device = resolve_device(config.device) if check_device else _named_device(config.device)
    spec = spec_of(
        hf,
        name=config.name or (DEMO_NAME if config.path == "demo" else path.name),
        path=str(path),
        model_digest=_model_digest(path, hf),
        tokenizer_digest=tokenizer_digest(_read_tokenizer(path)),
        dtype=resolve_dtype(config.dtype, device),
        device=device,
    )
    ends = (*spec.eos_token_ids, *_ends_of_turn(path))
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(ends)))


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer from its directory."""
    return _read_tokenizer(Path(spec.path))


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ModelNotFoundError(
            f"{path / 'config.json'} cannot be read: {_one_line(error)}", param="model.path"
        ) from error
    except UNREADABLE as error:
        raise UnsupportedModelError(
            f"{path / 'config.json'} is of no model that transformers knows: {_one_line(error)}",
            param="model.path",
        ) from error


def _read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, *UNREADABLE) as error:
        raise ModelNotFoundError(
            f"{path} holds no tokenizer that can be read: {_one_line(error)}", param="model.path"
        ) from error
    return tokenizer


def _ends_of_turn(path: Path) -> tuple[int, ...]:
    """Some chat models (Phi-3) name the token that ends a turn for generation only."""
    if not (path / "generation_config.json").exists():
        return ()
    try:
        return _ids(GenerationConfig.from_pretrained(path).eos_token_id)
    except (OSError, *UNREADABLE) as error:
        raise ModelNotFoundError(
            f"{path / 'generation_config.json'} cannot be read: {_one_line(error)}",
            param="model.path",
        ) from error


def _ids(eos: int | list[int] | None) -> tuple[int, ...]:
    return tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or repr(error)


def spec_of(
    hf: PreTrainedConfig,
    *,
    name: str,
    path: str,
    model_digest: str,
    tokenizer_digest: str,
    dtype: str,
    device: str,
) -> ModelSpec:
    """Read shapes from a transformers configuration."""
    heads = hf.num_attention_heads
    return ModelSpec(
        name=name,
        path=path,
        model_digest=model_digest,
        tokenizer_digest=tokenizer_digest,
        dtype=dtype,
        device=device,
        num_layers=hf.num_hidden_layers,
        num_q_heads=heads,
        num_kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        hidden_size=hf.hidden_size,
        max_positions=hf.max_position_embeddings,
        eos_token_ids=_ids(hf.eos_token_id),
        sliding_windows=sliding_windows(hf),
    )


def check_supported(hf: PreTrainedConfig) -> None:
    """Refuse what would be served wrongly.

    Raises:
        UnsupportedModelError: for other families, for RoPE variants whose factors change
            with the length of the sequence (dynamic, longrope) and for attention that is
            not causal.
    """
    if hf.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {hf.model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    for parameters in rope_parameters(hf).values():
        rope = parameters.get("rope_type", "default")
        if rope not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"RoPE type {rope!r} is not supported: its factors depend on the length of the "
                f"whole batch; supported: {', '.join(ROPE_TYPES)}"
            )
    if getattr(hf, "use_bidirectional_attention", False):
        raise UnsupportedModelError("bidirectional attention is not supported: it keeps no KV")


def rope_parameters(hf: PreTrainedConfig) -> dict[str | None, dict[str, Any]]:
    """Return RoPE's parameters by layer type; under None if all layers share them."""
    shared = getattr(hf, "rope_parameters", None) or {}
    by_type = {kind: own for kind, own in shared.items() if isinstance(own, dict)}
    return by_type or {None: shared}


def sliding_windows(hf: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens, None for full attention."""
    window: int | None = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None)
    if kinds is None:
        return (window,) * int(hf.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda"; "auto" takes a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch sees no GPU", param="model.device")
    return device


def _named_device(device: str) -> str:
    return "cpu" if device == "auto" else device


def resolve_path(config: ModelConfig) -> Path:
    """Return the model's local directory: demo, a path, or a cached Hub name."""
    if config.path == "demo":
        return ensure_demo_model(config.cache_dir)
    path = Path(config.path).expanduser()
    if (path / "config.json").exists():
        return path
    try:
        return Path(snapshot_download(config.path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ModelNotFoundError(
            f"no model at {config.path!r}: give a directory with config.json and safetensors, or "
            "a Hub name that is already in the local cache",
            param="model.path",
        ) from error


def config_digest_fields(hf: PreTrainedConfig) -> dict[str, Any]:
    """Return the configuration without fields that change nothing in the KV."""
    return {k: v for k, v in hf.to_dict().items() if k not in _VOLATILE}


def _model_digest(path: Path, hf: PreTrainedConfig) -> str:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{path} holds no safetensors files", param="model.path")
    digest = hashlib.sha256()
    fields = json.dumps(config_digest_fields(hf), sort_keys=True, default=str)
    digest.update(hashlib.sha256(fields.encode()).digest())
    for file in files:
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()
