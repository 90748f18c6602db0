"""The configuration: documented, strict, and merged in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from criticalkv.shared.config import Config, load_config, placed
from criticalkv.shared.errors import ConfigError


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, f"{path}.{name}".lstrip("."))


SECTIONS = list(sections(Config))
FIELDS = [
    pytest.param(field, id=f"{path}.{name}")
    for path, section in SECTIONS
    for name, field in section.model_fields.items()
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_documented_and_has_a_default(field: object) -> None:
    assert field.description  # type: ignore[attr-defined]
    assert not field.is_required()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("path", "section"), SECTIONS, ids=[p or "root" for p, _ in SECTIONS])
def test_every_section_is_strict_frozen_and_documented(path: str, section: type[BaseModel]) -> None:
    assert section.model_config["extra"] == "forbid", path
    assert section.model_config["frozen"] is True, path
    assert section.__doc__, path


def test_defaults_are_local_only() -> None:
    config = load_config()
    assert config.gateway.host == "127.0.0.1"
    assert config.store.address.startswith("127.0.0.1:")
    assert config.store.redis_url == "embedded"


def test_the_later_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"gateway": {"port": 1001, "max_body_mb": 3, "max_choices": 2}}))
    monkeypatch.setenv("CRITICALKV__GATEWAY__PORT", "1002")
    monkeypatch.setenv("CRITICALKV__GATEWAY__MAX_BODY_MB", "4")
    monkeypatch.setenv("CRITICALKV__DECODE__AUTOSCALING__MAX_REPLICAS", "7")
    config = load_config(str(file), {"gateway": {"port": 1003}})
    assert config.gateway.port == 1003  # flag over environment over file
    assert config.gateway.max_body_mb == 4  # environment over file
    assert config.gateway.max_choices == 2  # file over default
    assert config.gateway.host == "127.0.0.1"  # default
    assert config.decode.autoscaling.max_replicas == 7


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"gateway": {"prot": 1}}, "gateway.prot"),
        ({"gateway": {"port": 0}}, "gateway.port"),
        ({"gateway": {"port": "http"}}, "gateway.port"),
        ({"decode": {"autoscaling": {"max_replicas": 0}}}, "decode.autoscaling.max_replicas"),
        ({"eviction": {"policy": "no-such"}}, "eviction.policy"),
        ({"eviction": {"tiers": ["0.4", "0.2"]}}, "eviction.tiers"),
        ({"unknown": {}}, "unknown"),
        ({"model": 3}, "model"),
        ({"prefill": {"num_gpus": 2}}, "prefill.num_gpus"),
        ({"decode": {"num_gpus": 1.5}}, "decode.num_gpus"),
        ({"eviction": {"tiers": "0.4"}}, "eviction.tiers"),
        ({"eviction": {"tiers": [0.1, 2]}}, "eviction.tiers"),
    ],
)
def test_errors_name_the_field(overrides: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "nan", "inf", "x"])
def test_store_tier_is_a_fraction(value: str) -> None:
    with pytest.raises(ConfigError):
        load_config(overrides={"eviction": {"store_tier": value}})


@pytest.mark.parametrize("text", ["- a list", "just text", "{unclosed"])
def test_a_file_that_is_no_map(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)):
        load_config(str(file))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(str(tmp_path / "none.yaml"))


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert load_config(str(file)) == load_config()


def test_tiers_may_be_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides={"eviction": {"store_tier": 0.4, "tiers": [0.1, 0.4, 1]}})
    assert (config.eviction.store_tier, config.eviction.tiers) == ("0.4", ("0.1", "0.4", "1"))
    monkeypatch.setenv("CRITICALKV__EVICTION__STORE_TIER", "0.2")
    assert load_config().eviction.store_tier == "0.2"


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes("model: {name: caf\u00e9}".encode("latin-1"))
    with pytest.raises(ConfigError, match=str(file)):
        load_config(str(file))


def test_a_variable_that_is_no_yaml_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CRITICALKV__STORE__REDIS_URL", "{secret")
    with pytest.raises(ConfigError, match="CRITICALKV__STORE__REDIS_URL") as caught:
        load_config()
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("order", [1, -1])
def test_variables_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    for name in ("CRITICALKV__GATEWAY", "CRITICALKV__GATEWAY__PORT")[::order]:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="CRITICALKV__GATEWAY__PORT"):
        load_config()


def test_an_empty_section_means_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gateway:\ndecode:\n  autoscaling:\n")
    assert load_config(str(file)) == load_config()
    file.write_text("gateway: {port: 9}")
    monkeypatch.setenv("CRITICALKV__GATEWAY", "")
    assert load_config(str(file)).gateway.port == 9


@pytest.mark.parametrize(
    ("model", "gpus", "expected"),
    [
        ({}, 0, ("cpu", "float32")),
        ({}, 1, ("cuda", "bfloat16")),
        ({}, 0.5, ("cuda", "bfloat16")),
        ({"dtype": "float16"}, 1, ("cuda", "float16")),
        ({"device": "cpu"}, 1, ("cpu", "float32")),
        ({"device": "cuda", "dtype": "float32"}, 1, ("cuda", "float32")),
    ],
)
def test_device_and_dtype_follow_from_the_configuration_alone(
    model: dict[str, str], gpus: float, expected: tuple[str, str]
) -> None:
    parts = {"prefill": {"num_gpus": gpus}, "decode": {"num_gpus": gpus}}
    config = placed(load_config(overrides={"model": model, **parts}))
    assert (config.model.device, config.model.dtype) == expected
    assert placed(config) == config


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"model": {"device": "cuda"}}, "prefill.num_gpus"),
        ({"model": {"device": "cuda"}, "prefill": {"num_gpus": 1}}, "decode.num_gpus"),
        ({"decode": {"num_gpus": 1}}, "prefill.num_gpus"),
    ],
)
def test_a_worker_without_the_gpu_that_it_needs(overrides: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match="num_gpus") as caught:
        placed(load_config(overrides=overrides))
    assert caught.value.param == field


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        load_config().gateway.port = 1


def test_it_survives_a_round_trip() -> None:
    config = _reread(load_config(overrides={"gateway": {"port": 9}}))
    assert config.gateway.port == 9
    assert _reread(config) == config


def _reread(config: Config) -> Config:
    return Config.model_validate(config.model_dump(mode="json"))
