"""The Serve application: gateway in front of prefill and decode.

Turns configuration into deployment options. Knows nothing of how the parts work.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from criticalkv.services.cluster import TIMEOUT_MARGIN_S
from criticalkv.services.decode.deployment import Decode
from criticalkv.services.gateway.deployment import Gateway
from criticalkv.services.loopback import on_loopback
from criticalkv.services.prefill.deployment import Prefill
from criticalkv.services.routing import ResidentRouter
from criticalkv.services.scaling import DecodePolicy, PrefillPolicy
from criticalkv.shared.config import (
    Autoscaling,
    Config,
    DecodeConfig,
    PrefillConfig,
    load_config,
    placed,
)
from criticalkv.shared.malloc import ENVIRONMENT as LARGE_BUFFERS
from criticalkv.shared.malloc import ONE_ARENA, ONE_HEAP

APP_NAME = "criticalkv"
# Each of malloc's arenas would keep its own largest need for ever.
FEW_LARGE_BUFFERS = {**LARGE_BUFFERS, **ONE_ARENA}
# A replica under full load answers late; one that died is noticed at once anyhow.
LIFECYCLE: dict[str, Any] = {
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 30.0,
    "graceful_shutdown_wait_loop_s": 0.2,
}
ROUTING_STATS_PERIOD_S = 5.0
LOOK_BACK_REPORTS = 3  # over which Serve takes the mean of what handles have queued


def build(config: Config) -> Application:
    """Compose the application from a checked configuration.

    Raises:
        ConfigError: if device and GPUs contradict each other.
    """
    config = placed(config)
    prefill = prefill_deployment(config).bind(config)
    decode = decode_deployment(config).bind(config)
    return gateway_deployment(config).bind(config, prefill, decode)


def app_builder(args: dict[str, Any]) -> Application:
    """Compose it from a map of sections: the `args` of a Serve config file."""
    return build(load_config(overrides=args))


def gateway_deployment(config: Config) -> Deployment:
    """Deploy the HTTP front once; it only moves requests and tokens."""
    gateway = config.gateway
    return _deployment(
        config,
        # Without an argument the replica builds its app itself, after its constructor.
        serve.ingress()(on_loopback(Gateway)),
        "gateway",
        num_replicas=1,
        # Twice the limit: the gateway itself answers 429 beyond it, and stays able to
        # answer /health meanwhile. Serve's own 503 comes only after that.
        max_ongoing_requests=2 * gateway.max_ongoing,
        max_queued_requests=gateway.max_ongoing,
        # Many threads, small objects.
        ray_actor_options=_actor(gateway.num_cpus, 0, 1, gateway.ray_resources, ONE_HEAP),
    )


def prefill_deployment(config: Config) -> Deployment:
    """Deploy prefill, scaled by its own settings."""
    prefill = config.prefill
    return _deployment(
        config,
        on_loopback(Prefill),
        "prefill",
        max_ongoing_requests=prefill.max_ongoing + 1,  # one in the background
        max_queued_requests=prefill.max_queued,
        ray_actor_options=_actor(
            prefill.num_cpus, prefill.num_gpus, prefill.threads, prefill.ray_resources
        ),
        **_replicas(prefill.autoscaling, _prefill_policy(prefill)),
    )


def decode_deployment(config: Config) -> Deployment:
    """Deploy decode, scaled by its own settings."""
    decode = config.decode
    return _deployment(
        config,
        on_loopback(Decode),
        "decode",
        max_ongoing_requests=decode.max_num_seqs,
        max_queued_requests=decode.max_queued,
        ray_actor_options=_actor(
            decode.num_cpus, decode.num_gpus, decode.threads, decode.ray_resources
        ),
        request_router_config=_routing(decode),
        **_replicas(decode.autoscaling, _decode_policy(decode)),
    )


def _deployment(config: Config, replica: Any, name: str, **options: Any) -> Deployment:
    # Serve kills a replica that still has requests after this time: none may be cut, so
    # it is longer than any. What a stopping local cluster waits for is bounded there.
    drain_s = config.gateway.request_timeout_s + TIMEOUT_MARGIN_S
    made: Deployment = serve.deployment(
        name=name, graceful_shutdown_timeout_s=drain_s, **LIFECYCLE, **options
    )(replica)
    return made


def _routing(decode: DecodeConfig) -> RequestRouterConfig:
    settings: dict[str, Any] = {
        "request_router_class": ResidentRouter,
        "request_router_kwargs": {"slack": decode.routing_slack},
        "request_routing_stats_period_s": ROUTING_STATS_PERIOD_S,
    }
    return RequestRouterConfig(**settings)


def _decode_policy(decode: DecodeConfig) -> AutoscalingPolicy:
    scaling = decode.autoscaling
    return _policy(
        DecodePolicy,
        target_kv_share=scaling.target_kv_share,
        target_seq_share=scaling.target_seq_share,
        target_waiting_tokens=scaling.target_waiting_tokens,
        max_num_seqs=decode.max_num_seqs,
    )


def _prefill_policy(prefill: PrefillConfig) -> AutoscalingPolicy:
    return _policy(PrefillPolicy, target_waiting_tokens=prefill.autoscaling.target_waiting_tokens)


def _policy(kind: type[Any], **settings: float) -> AutoscalingPolicy:
    return AutoscalingPolicy(policy_function=kind, policy_kwargs=settings)


def _replicas(scaling: Autoscaling, policy: AutoscalingPolicy) -> dict[str, Any]:
    if scaling.min_replicas == scaling.max_replicas:
        return {"num_replicas": scaling.max_replicas}
    with warnings.catch_warnings():
        # The variables that are to replace `metrics_interval_s` have no effect yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        serves = AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            metrics_interval_s=scaling.report_interval_s,
            look_back_period_s=LOOK_BACK_REPORTS * scaling.report_interval_s,
            policy=policy,
        )
    return {"autoscaling_config": serves}


def _actor(
    num_cpus: float,
    num_gpus: float,
    threads: int,
    resources: dict[str, float],
    malloc: dict[str, str] = FEW_LARGE_BUFFERS,
) -> dict[str, Any]:
    return {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "resources": resources,
        "runtime_env": {"env_vars": worker_env(threads, malloc)},
    }


def worker_env(threads: int, malloc: dict[str, str]) -> dict[str, str]:
    """Environment of a replica: few threads that sleep while waiting, no downloads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Spinning threads of one worker starve the other workers of the machine.
        "OMP_WAIT_POLICY": "passive",
        # Weights that decode prepacks lie in huge pages, as mapped files do.
        "THP_MEM_ALLOC_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        **malloc,
    }
