"""Policies of autoscaling: exact numbers, and what replicas did not tell."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import asdict, fields
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from criticalkv.services import app as application
from criticalkv.services.decode.load import DecodeLoad
from criticalkv.services.scaling import DecodePolicy, PrefillPolicy
from criticalkv.shared.config import Config, load_config
from criticalkv.shared.errors import ConfigError

MIB = 1 << 20
IDLE = DecodeLoad(
    pool_bytes=100 * MIB,
    used_bytes=0,
    kept_bytes=0,
    queued_bytes=0,
    waiting=0,
    waiting_tokens=0,
    running=0,
    tokens_per_s=0.0,
)


def replica(name: str) -> ReplicaID:
    return ReplicaID(name, DeploymentID("decode", "criticalkv"))


def context(
    reports: list[dict[str, float] | None],
    *,
    target: int | None = None,
    queued: float = 0.0,
    bounds: tuple[int, int] = (0, 100),
    others: dict[str, dict[str, float]] | None = None,
    config: AutoscalingConfig | None = None,
) -> AutoscalingContext:
    """What Serve gives a policy; None = a replica that has told nothing yet."""
    ids = [replica(str(index)) for index in range(len(reports))]
    told = [(key, report) for key, report in zip(ids, reports, strict=True) if report]
    told += [(replica(name), report) for name, report in (others or {}).items()]
    raw: dict[str, dict[ReplicaID, Any]] = {}
    for key, report in told:
        for name, value in report.items():
            # An older point of another value: only the last one counts.
            points = [TimeStampedValue(1.0, 7e9), TimeStampedValue(2.0, value)]
            raw.setdefault(name, {})[key] = points
    return AutoscalingContext(
        deployment_id=DeploymentID("decode", "criticalkv"),
        deployment_name="decode",
        app_name="criticalkv",
        current_num_replicas=len(ids),
        target_num_replicas=len(ids) if target is None else target,
        running_replicas=ids,
        total_num_requests=queued,
        total_queued_requests=queued,
        aggregated_metrics={},
        raw_metrics=lambda: raw,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=3.0,
        config=config,
    )


def decode() -> DecodePolicy:
    return DecodePolicy(
        target_kv_share=0.8, target_seq_share=0.8, target_waiting_tokens=4096, max_num_seqs=10
    )


def loaded(**numbers: float) -> dict[str, float]:
    return {**asdict(IDLE), **numbers}


@pytest.mark.parametrize(
    ("reports", "queued", "expected"),
    [
        ([loaded()], 0, 0),
        ([loaded(running=1)], 0, 1),
        # Room: 80 MiB per replica.
        ([loaded(used_bytes=80 * MIB)], 0, 1),
        ([loaded(used_bytes=80 * MIB + 1)], 0, 2),
        ([loaded(used_bytes=40 * MIB, queued_bytes=121 * MIB)], 0, 3),
        ([loaded(used_bytes=80 * MIB), loaded(queued_bytes=81 * MIB)], 0, 3),
        ([loaded(kept_bytes=100 * MIB)], 0, 0),
        # Places: 8 per replica.
        ([loaded(running=8)], 0, 1),
        ([loaded(running=8, waiting=1)], 0, 2),
        ([loaded(running=8), loaded(running=8)], 0, 2),
        ([loaded(running=8), loaded(running=8)], 1, 3),
        ([loaded(running=10)], 14.5, 4),
        # Tokens: 4096 per replica.
        ([loaded(waiting_tokens=4096)], 0, 1),
        ([loaded(waiting_tokens=4097)], 0, 2),
        # The scarcest of them.
        ([loaded(used_bytes=100 * MIB, running=20, waiting_tokens=4096)], 0, 3),
    ],
)
def test_decode_needs(reports: list[Any], queued: float, expected: int) -> None:
    assert decode()(context(reports, queued=queued)) == (expected, {})


def test_the_errors_of_floats_start_no_replica() -> None:
    policy = DecodePolicy(1.0, 0.7, 4096, 10)
    assert policy(context([loaded(running=14)], queued=1e-12))[0] == 2


@pytest.mark.parametrize(
    ("reports", "queued", "expected"),
    [
        ([{"waiting": 0, "waiting_tokens": 0}], 0, 0),
        ([{"waiting": 1, "waiting_tokens": 1}], 0, 1),
        ([{"waiting": 2, "waiting_tokens": 8192}], 0, 1),
        ([{"waiting": 2, "waiting_tokens": 8193}], 0, 2),
        # Three more of the mean of 1000.
        ([{"waiting": 3, "waiting_tokens": 3000}], 3, 1),
        ([{"waiting": 2, "waiting_tokens": 4000}], 3, 2),
        ([{"waiting": 2, "waiting_tokens": 4000}, {"waiting": 2, "waiting_tokens": 8000}], 2, 3),
        # Of what size are the queued ones? Not known: the replica tells with the next report.
        ([{"waiting": 0, "waiting_tokens": 0}], 5, 0),
    ],
)
def test_prefill_needs(reports: list[Any], queued: float, expected: int) -> None:
    assert PrefillPolicy(8192)(context(reports, queued=queued)) == (expected, {})


def test_the_number_stays_within_bounds() -> None:
    busy, idle = loaded(running=80), loaded()
    assert decode()(context([busy], bounds=(1, 4)))[0] == 4
    assert decode()(context([idle], bounds=(1, 4)))[0] == 1
    assert decode()(context([], target=9, bounds=(1, 4)))[0] == 4


def test_what_is_not_known_is_not_idle() -> None:
    """A replica that just started, or hangs: no fewer than now, but more if need be."""
    assert decode()(context([loaded(), None], target=2))[0] == 2
    assert decode()(context([loaded(running=17), None], target=2))[0] == 3
    assert decode()(context([loaded(), loaded()], target=2))[0] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_a_replica_that_told_nothing(bad: float) -> None:
    for name in DecodePolicy.NAMES:
        assert decode()(context([loaded(**{name: bad}), loaded()], target=2))[0] == 2
    assert decode()(context([loaded(tokens_per_s=bad)]))[0] == 0  # nobody reads it
    assert decode()(context([loaded()], queued=bad))[0] == 0


def test_a_part_of_a_report_is_none() -> None:
    report = loaded()
    del report["waiting"]
    assert decode()(context([report], target=1))[0] == 1


def test_replicas_that_are_gone_do_not_count() -> None:
    gone = {"gone": loaded(running=80, used_bytes=900 * MIB)}
    assert decode()(context([loaded(running=1)], others=gone))[0] == 1


def test_without_replicas_the_number_stays() -> None:
    assert decode()(context([], target=2))[0] == 2
    assert PrefillPolicy(8192)(context([], target=0))[0] == 0


def test_a_replica_without_a_pool() -> None:
    assert decode()(context([loaded(pool_bytes=0, running=1)]))[0] == 1


def test_serve_applies_its_delays_and_begins_again_from_zero() -> None:
    now = AutoscalingConfig(min_replicas=0, max_replicas=9, upscale_delay_s=0, downscale_delay_s=0)
    late = now.model_copy(update={"upscale_delay_s": 60, "downscale_delay_s": 60})
    served = _apply_autoscaling_config(decode())
    busy, idle = [loaded(running=17)], [loaded(), loaded()]
    assert served(context(busy, config=now))[0] == 3
    assert served(context(busy, config=late))[0] == 1
    assert served(context(idle, config=now))[0] == 1
    assert served(context(idle, config=late))[0] == 2
    assert served(context([], target=0, queued=1, config=late))[0] == 1


def test_policies_read_what_replicas_tell() -> None:
    assert set(DecodePolicy.NAMES) <= {field.name for field in fields(DecodeLoad)}


@pytest.mark.parametrize("policy", [DecodePolicy, PrefillPolicy])
def test_the_controller_needs_no_import_of_ours(policy: type[Any]) -> None:
    code = (
        "import sys, pickle; sys.modules['criticalkv'] = None; "
        "policy = pickle.loads(sys.stdin.buffer.read()); "
        "print(policy.__name__, 'torch' in sys.modules)"
    )
    made = AutoscalingPolicy(policy_function=policy).get_serialized_policy_def()
    done = subprocess.run([sys.executable, "-c", code], input=made, capture_output=True, check=True)
    assert done.stdout.decode().split() == [policy.__name__, "False"]


def test_deployments_carry_their_own_policy() -> None:
    config = load_config(
        overrides={
            "decode": {
                "max_num_seqs": 5,
                "autoscaling": {"max_replicas": 3, "target_kv_share": 0.5},
            },
            "prefill": {"autoscaling": {"max_replicas": 2, "target_waiting_tokens": 7}},
        }
    )
    scaling = application.decode_deployment(config)._deployment_config.autoscaling_config
    assert scaling.policy.policy_kwargs == {
        "target_kv_share": 0.5,
        "target_seq_share": 0.8,
        "target_waiting_tokens": 4096,
        "max_num_seqs": 5,
    }
    assert scaling.look_back_period_s > scaling.metrics_interval_s
    DecodePolicy(**scaling.policy.policy_kwargs)
    scaling = application.prefill_deployment(config)._deployment_config.autoscaling_config
    assert scaling.policy.policy_kwargs == {"target_waiting_tokens": 7}
    PrefillPolicy(**scaling.policy.policy_kwargs)


def test_a_part_of_the_section_leaves_the_rest_at_its_defaults() -> None:
    config = load_config(overrides={"decode": {"autoscaling": {"max_replicas": 4}}})
    assert config.decode.autoscaling.min_replicas == Config().decode.autoscaling.min_replicas == 2
    with pytest.raises(ConfigError, match=r"decode\.autoscaling"):
        load_config(overrides={"decode": {"autoscaling": {"max_replicas": 1}}})


def test_no_replica_is_killed_before_its_longest_request_ends() -> None:
    config = load_config(overrides={"gateway": {"request_timeout_s": 1234}})
    for build in (
        application.decode_deployment,
        application.prefill_deployment,
        application.gateway_deployment,
    ):
        assert build(config)._deployment_config.graceful_shutdown_timeout_s > 1234
