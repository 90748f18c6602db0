"""infra/serve.yaml: valid for Ray Serve and for us, with separate scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from criticalkv.services import app as application
from criticalkv.shared.config import Config, load_config
from criticalkv.shared.errors import ConfigError

FILE = Path(__file__).resolve().parents[2] / "infra" / "serve.yaml"


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


@pytest.fixture(scope="module")
def config(data: dict[str, Any]) -> Config:
    return load_config(overrides=data["applications"][0]["args"])


def test_ray_accepts_it(data: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(data)
    assert [app.name for app in schema.applications] == [application.APP_NAME]
    module, _, builder = schema.applications[0].import_path.partition(":")
    assert module == application.__name__
    assert callable(getattr(application, builder))


def test_it_agrees_with_itself(data: dict[str, Any], config: Config) -> None:
    assert data["http_options"]["host"] == config.gateway.host == "127.0.0.1"
    assert data["http_options"]["port"] == config.gateway.port
    assert data["http_options"]["request_timeout_s"] > config.gateway.request_timeout_s


def test_the_builder_takes_its_args(data: dict[str, Any]) -> None:
    assert application.app_builder(data["applications"][0]["args"])


@pytest.mark.parametrize("here", [True, False])
def test_all_deployments_get_one_device_and_dtype(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: here)
    gpu = {"num_gpus": 1}
    gateway = application.app_builder({"prefill": gpu, "decode": gpu})._bound_deployment
    config, prefill, decode = gateway.init_args
    models = [
        config.model,
        *(part._bound_deployment.init_args[0].model for part in (prefill, decode)),
    ]
    assert {(model.device, model.dtype) for model in models} == {("cuda", "bfloat16")}


def test_the_builder_refuses_a_gpu_model_without_gpus() -> None:
    with pytest.raises(ConfigError, match=r"prefill\.num_gpus"):
        application.app_builder({"model": {"device": "cuda"}})


def test_the_builder_names_a_wrong_field() -> None:
    with pytest.raises(ConfigError, match=r"decode\.max_seqs"):
        application.app_builder({"decode": {"max_seqs": 1}})


def test_prefill_and_decode_scale_apart(config: Config) -> None:
    prefill = application.prefill_deployment(config)
    decode = application.decode_deployment(config)
    for deployment, part in ((prefill, config.prefill), (decode, config.decode)):
        scaling = deployment._deployment_config.autoscaling_config
        assert scaling is not None
        for name in ("min_replicas", "max_replicas", "upscale_delay_s", "downscale_delay_s"):
            assert getattr(scaling, name) == getattr(part.autoscaling, name)
        assert scaling.metrics_interval_s == part.autoscaling.report_interval_s
    # One place more: a background run must not take one of the others'.
    assert prefill.max_ongoing_requests == config.prefill.max_ongoing + 1
    assert decode.max_ongoing_requests == config.decode.max_num_seqs


def test_equal_bounds_fix_the_number() -> None:
    decode = application.decode_deployment(Config())
    assert decode.num_replicas == 2
    assert decode._deployment_config.autoscaling_config is None


def test_workers_get_their_threads() -> None:
    decode = application.decode_deployment(load_config(overrides={"decode": {"threads": 3}}))
    assert decode.ray_actor_options is not None
    env = decode.ray_actor_options["runtime_env"]["env_vars"]
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["OMP_WAIT_POLICY"] == "passive"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "working_dir" not in decode.ray_actor_options["runtime_env"]


def test_only_replicas_with_large_buffers_keep_what_they_freed() -> None:
    """Each of glibc's arenas keeps its own: with many threads that looks like a leak."""
    gateway, decode = (
        build(Config()).ray_actor_options
        for build in (application.gateway_deployment, application.decode_deployment)
    )
    assert gateway is not None
    assert decode is not None
    assert malloc_of(gateway) == {
        "MALLOC_ARENA_MAX": "1",
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    }
    large = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert malloc_of(decode).keys() == large | {"MALLOC_ARENA_MAX"}


def malloc_of(actor: dict[str, Any]) -> dict[str, str]:
    variables = actor["runtime_env"]["env_vars"]
    return {name: value for name, value in variables.items() if "MALLOC" in name or "GLIBC" in name}
