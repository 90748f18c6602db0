"""A tiny Llama that is the same bits everywhere, and the reader of recorded decisions.

Weights come from uniform draws of a frozen generator, one stream per parameter name, and
additions only: no torch generator and no libm call whose last bit may differ. Imports plain
numpy, torch and transformers, so that another library's environment can use it, too.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 2025
NUM_TOKENS = 203
GAINS = {"q_proj": 4.0, "k_proj": 4.0, "v_proj": 2.0}


def golden_config() -> LlamaConfig:
    """Return 3 layers, 6 query heads, 2 KV heads, head_dim 16, hidden 48, vocabulary 97."""
    return LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )


def golden_model() -> LlamaForCausalLM:
    """Return the model in fp32: peaked attention, value norms that differ widely."""
    model = LlamaForCausalLM(golden_config()).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(_weight(name, tuple(weight.shape))))
    return model


def golden_ids(num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return token ids: uniform, with every third one from a small set that repeats."""
    draws = _generator("token ids").random_sample(num_tokens)
    return [int(u * 97) if i % 3 else int(u * 7) for i, u in enumerate(draws)]


def weights_digest(model: torch.nn.Module) -> str:
    """Return the sha256 of all parameters, by name."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(name.encode() + weight.detach().float().numpy().tobytes())
    return digest.hexdigest()


def _generator(name: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(f"{SEED} {name}".encode()))


def _weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return nearly normal values: the sum of twelve uniforms, less six."""
    generator = _generator(name)
    total = generator.random_sample(shape)
    for _ in range(11):
        total = total + generator.random_sample(shape)
    total -= 6.0
    if len(shape) == 1:
        return (1.0 + 0.125 * total).astype(np.float32)
    if "v_proj" in name:
        total = total * np.abs(total)  # a heavy tail
    gain = next((g for part, g in GAINS.items() if part in name), 1.5)
    return (total * (gain / shape[1] ** 0.5)).astype(np.float32)


@dataclass(frozen=True)
class Golden:
    """Decisions of another library on one model and one list of token ids.

    Attributes:
        manifest: versions, model, `token_ids`, `compression_ratios`, `cases` by id.
        kept: bool [cases, ratios, layers, num_kv_heads, n].
        near: the entries whose decision some relative change of the scores by up to
            `manifest["tolerance"]` turns over; ties among them. Compare outside it.
        fp64: the entries that the same model in fp64 decides differently.
    """

    manifest: dict[str, Any]
    kept: NDArray[np.bool_]
    near: NDArray[np.bool_]
    fp64: NDArray[np.bool_]

    def case(self, name: str, ratio: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return one case's kept and what to leave out, each bool [layers, num_kv_heads, n].

        What rounding or a rule for ties decides: `near`, where fp64 differs (scores that
        underflow), and the whole window where a head's budget is smaller.
        """
        row = list(self.manifest["cases"]).index(name)
        column = self.manifest["compression_ratios"].index(ratio)
        contested = self.near[row, column] | self.fp64[row, column]
        n = contested.shape[-1]
        window = _window(self.manifest["cases"][name])
        if int(n * (1 - ratio)) < window:
            contested[..., n - window :] = True
        return self.kept[row, column], contested


def _window(case: dict[str, Any]) -> int:
    """Return the observation window of a press or of the one it wraps; 0 without one."""
    inner = case["press"]
    return int(
        case.get("window_size", 0) if isinstance(inner, str) else inner.get("window_size", 0)
    )


def read_golden(path: Path) -> Golden:
    """Read a file that `write_golden` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        manifest = json.loads(stored["manifest"].tobytes())
        shape = manifest["shape"]
        count = int(np.prod(shape[2:]))
        masks = [
            np.unpackbits(stored[name], axis=-1, count=count).astype(bool).reshape(shape)
            for name in ("kept", "near", "fp64")
        ]
    return Golden(manifest, *masks)


def write_golden(path: Path, golden: Golden) -> None:
    """Write the masks bit-packed and the manifest as JSON; equal content, equal bytes."""
    manifest = {**golden.manifest, "shape": list(golden.kept.shape)}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    np.savez_compressed(
        path,
        manifest=np.frombuffer(text, dtype=np.uint8),
        kept=_packed(golden.kept),
        near=_packed(golden.near),
        fp64=_packed(golden.fp64),
    )


def _packed(masks: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(masks.reshape(*masks.shape[:2], -1), axis=-1)
