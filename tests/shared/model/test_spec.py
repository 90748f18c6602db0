"""What identifies a model, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from criticalkv.shared.config import ModelConfig
from criticalkv.shared.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from criticalkv.shared.model import demo, loader
from criticalkv.shared.model.spec import (
    check_supported,
    load_spec,
    resolve_device,
    resolve_dtype,
    sliding_windows,
)


def save(path: Path, *, template: str = "{{ messages }}", **fields: Any) -> ModelConfig:
    """Write a tiny model with a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **fields,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return ModelConfig(path=str(path))


def test_a_saved_model_is_described(tmp_path: Path) -> None:
    spec = load_spec(save(tmp_path / "tiny", eos_token_id=[2, 3], max_position_embeddings=99))
    assert (spec.name, spec.dtype, spec.device) == ("tiny", "float32", "cpu")
    assert (spec.num_layers, spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 4)
    assert (spec.max_positions, spec.eos_token_ids, spec.group_size) == (99, (2, 3), 2)


def test_what_ends_a_turn_may_stand_with_the_generation_settings(tmp_path: Path) -> None:
    config, file = save(tmp_path / "tiny", eos_token_id=2), tmp_path / "tiny/generation_config.json"
    assert load_spec(config).eos_token_ids == (2,)
    file.write_text('{"eos_token_id": [2, 5, 7]}')
    assert load_spec(config).eos_token_ids == (2, 5, 7)
    file.unlink()
    assert load_spec(config).eos_token_ids == (2,)
    file.write_text("{")
    with pytest.raises(ModelNotFoundError, match=r"generation_config\.json"):
        load_spec(config)


def test_the_digest_follows_weights_and_config_and_nothing_else(tmp_path: Path) -> None:
    base = load_spec(save(tmp_path / "a"))
    assert load_spec(save(tmp_path / "b")).model_digest == base.model_digest
    assert load_spec(save(tmp_path / "c", rms_norm_eps=1e-3)).model_digest != base.model_digest
    text = (tmp_path / "b" / "config.json").read_text()
    (tmp_path / "b" / "config.json").write_text(text.replace('"5.', '"6.'))
    assert load_spec(ModelConfig(path=str(tmp_path / "b"))).model_digest == base.model_digest
    weights = tmp_path / "b" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert load_spec(ModelConfig(path=str(tmp_path / "b"))).model_digest != base.model_digest


def test_the_chat_template_is_part_of_the_tokenizers_digest(tmp_path: Path) -> None:
    one, two = save(tmp_path / "a"), save(tmp_path / "b", template="{{ messages }} ")
    assert load_spec(one).tokenizer_digest != load_spec(two).tokenizer_digest


@pytest.mark.parametrize("path", ["nowhere/at/all", "https://example.org/model", "../../etc"])
def test_an_unknown_model_is_named(path: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model|config\.json"):
        load_spec(ModelConfig(path=path))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    config = save(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").rename(tmp_path / "tiny" / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        load_spec(config)


def test_other_families_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gemma2"):
        check_supported(Gemma2Config())


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_length_dependent_rope_is_refused(rope: str) -> None:
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=rope):
        check_supported(config)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_length_dependent_rope_of_one_layer_type_is_refused(rope: str, kind: str) -> None:
    config = Gemma3TextConfig()
    check_supported(config)
    config.rope_parameters[kind] = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=rope):
        check_supported(config)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_long_rope_is_refused(name: str) -> None:
    """Older files call it "su" or "yarn"."""
    check_supported(Phi3Config(pad_token_id=0))
    rope = {"type": name, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope["original_max_position_embeddings"] = 4096
    long = Phi3Config(pad_token_id=0, rope_scaling=rope)
    with pytest.raises(UnsupportedModelError, match="longrope"):
        check_supported(long)


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        check_supported(Gemma3TextConfig(use_bidirectional_attention=True))


def test_sliding_windows_are_per_layer() -> None:
    assert sliding_windows(MistralConfig(num_hidden_layers=2, sliding_window=7)) == (7, 7)
    assert sliding_windows(LlamaConfig(num_hidden_layers=2)) == (None, None)
    mixed = Qwen2Config(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=2
    )
    assert sliding_windows(mixed) == (None, None, 9)
    gemma = Gemma3TextConfig(num_hidden_layers=3, sliding_window=9, sliding_window_pattern=2)
    assert sliding_windows(gemma) == (9, None, 9)
    assert sliding_windows(Phi3Config(num_hidden_layers=2, sliding_window=7)) == (7, 7)


def test_defaults_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="no GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize("here", [True, False])
def test_who_only_names_nodes_needs_no_gpu(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = save(tmp_path / "tiny").model_copy(update={"device": "cuda"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    spec = load_spec(config, check_device=False)
    assert (spec.device, spec.dtype) == ("cuda", "bfloat16")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("config.json", "{", ModelNotFoundError),
        ("config.json", '{"model_type": "no-such"}', UnsupportedModelError),
        ("config.json", "{}", UnsupportedModelError),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', UnsupportedModelError),
        ("tokenizer.json", "{", ModelNotFoundError),
        ("tokenizer.json", None, ModelNotFoundError),
    ],
)
def test_broken_files_are_one_line(
    tmp_path: Path, name: str, text: str | None, error: type[Exception]
) -> None:
    config = save(tmp_path / "tiny")
    (tmp_path / "tiny" / name).unlink()
    if text is not None:
        (tmp_path / "tiny" / name).write_text(text)
    with pytest.raises(error, match=str(tmp_path)) as caught:
        load_spec(config)
    assert "\n" not in str(caught.value)


def test_what_a_model_needs_is_counted_in_the_loaded_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(save(tmp_path / "tiny"))
    stored = (tmp_path / "tiny" / "model.safetensors").stat().st_size  # float32
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (stored * 0.6, stored))
    with pytest.raises(ConfigError, match="exactly one GPU"):
        loader._check_fits(spec)
    loader._check_fits(dataclasses.replace(spec, dtype="bfloat16"))


def test_a_model_that_does_not_fit_one_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(save(tmp_path / "tiny"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    with pytest.raises(ConfigError, match="exactly one GPU"):
        loader._check_fits(spec)


def test_a_wrong_checksum_stops_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / demo.GGUF_FILE
    bad.write_bytes(b"not the model")
    monkeypatch.setattr(demo, "_installed", lambda: bad)
    with pytest.raises(ConfigError, match="sha256"):
        demo.ensure_demo_model(str(tmp_path / "cache"))
    assert not (tmp_path / "cache" / demo.NAME).exists()
