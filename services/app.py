"""The Serve application: gateway in front of prefill and decode.

Turns configuration into deployment options. Knows nothing of how the parts work.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve import Application, Deployment

from criticalkv.services.decode.deployment import Decode
from criticalkv.services.gateway.deployment import Gateway
from criticalkv.services.loopback import on_loopback
from criticalkv.services.prefill.deployment import Prefill
from criticalkv.shared.config import Autoscaling, Config, load_config, placed
from criticalkv.shared.malloc import ENVIRONMENT as MALLOC

APP_NAME = "criticalkv"
# A replica under full load answers late; one that died is noticed at once anyhow.
LIFECYCLE: dict[str, Any] = {
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 30.0,
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 20.0,
}


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
        # Without an argument the replica builds its app itself, after its constructor.
        serve.ingress()(on_loopback(Gateway)),
        "gateway",
        num_replicas=1,
        # Twice the limit: the gateway itself answers 429 beyond it, and stays able to
        # answer /health meanwhile. Serve's own 503 comes only after that.
        max_ongoing_requests=2 * gateway.max_ongoing,
        max_queued_requests=gateway.max_ongoing,
        ray_actor_options=_actor(num_cpus=gateway.num_cpus, num_gpus=0, threads=1),
    )


def prefill_deployment(config: Config) -> Deployment:
    """Deploy prefill, scaled by its own settings."""
    prefill = config.prefill
    return _deployment(
        on_loopback(Prefill),
        "prefill",
        max_ongoing_requests=prefill.max_ongoing + 1,  # one in the background
        max_queued_requests=prefill.max_queued,
        ray_actor_options=_actor(prefill.num_cpus, prefill.num_gpus, prefill.threads),
        **_replicas(prefill.autoscaling),
    )


def decode_deployment(config: Config) -> Deployment:
    """Deploy decode, scaled by its own settings."""
    decode = config.decode
    return _deployment(
        on_loopback(Decode),
        "decode",
        max_ongoing_requests=decode.max_num_seqs,
        max_queued_requests=decode.max_queued,
        ray_actor_options=_actor(decode.num_cpus, decode.num_gpus, decode.threads),
        **_replicas(decode.autoscaling),
    )


def _deployment(replica: Any, name: str, **options: Any) -> Deployment:
    made: Deployment = serve.deployment(name=name, **LIFECYCLE, **options)(replica)
    return made


def _replicas(scaling: Autoscaling) -> dict[str, Any]:
    if scaling.min_replicas == scaling.max_replicas:
        return {"num_replicas": scaling.max_replicas}
    return {"autoscaling_config": scaling.model_dump()}


def _actor(num_cpus: float, num_gpus: float, threads: int) -> dict[str, Any]:
    return {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "runtime_env": {"env_vars": worker_env(threads)},
    }


def worker_env(threads: int) -> dict[str, str]:
    """Environment of a replica: few threads that sleep while waiting, no downloads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Spinning threads of one worker starve the other workers of the machine.
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        **MALLOC,
    }
