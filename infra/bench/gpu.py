"""GPU kernels: right by the 2× rule, how near to the hardware's limit, what scoring costs.

Knows `criticalkv.kernels`, torch, triton and transformers only. Started by gpu.sh.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import gpu_checks
import gpu_prefill
import gpu_speed
import torch
from gpu_shape import LLAMA, Shape
from gpu_speed import Ceilings

Found = TypeVar("Found")
BATCHES = (1, 4, 16, 64)
DEADLINE_S = 210
"""gpu.sh stops everything at 240 seconds."""
MEANING = {
    "value_norm_vs_limit": "time of its matrix products at the measured matmul rate ÷ time of "
    "value_norm l1, 32K tokens of a Llama-3.1-8B layer in bf16; higher is better",
    "window_scores_vs_limit": "time of reading the keys and writing the scores once at the "
    "measured copy rate, or of its products, the longer ÷ time of the pooled mean attention "
    "of 32 queries, 32K tokens; higher is better",
    "pack_vs_copy": "bytes read and written per second by packing 40 % of 32K tokens ÷ by a "
    "copy; higher is better",
    "scoring_share_32k": "(seconds of a scored prefill − of a plain one) ÷ of a plain one, 32K "
    "tokens, norm l1; lower is better",
    "scoring_share_32k_l2": "the same with norm l2; lower is better",
    "wrong_checks": "checks that break the 2x rule or failed; lower is better",
}


def main(path: str) -> None:
    """Measure and write the report; fail if a kernel is wrong or did not run."""
    attempts = Attempts(time.perf_counter() + DEADLINE_S)
    described = {"environment": environment()}
    ceilings = Ceilings.measured(LLAMA.device)
    report: dict[str, Any] = {}
    for report in measure(LLAMA, ceilings, attempts):  # if time runs out, what there is stays
        Path(path).write_text(json.dumps(report | described, indent=1) + "\n")
    print(json.dumps(report["headline"], indent=1))
    if attempts.errors or report["headline"]["wrong_checks"]:
        sys.exit("\n".join(["a kernel is wrong or failed", *attempts.errors]))


@dataclass
class Attempts:
    """Runs one thing after another, whatever one of them does.

    Attributes:
        deadline: of `time.perf_counter`, after which nothing is begun.
        errors: a line for each that failed.
    """

    deadline: float
    errors: list[str] = field(default_factory=list)

    def run(self, call: Callable[[], Found]) -> Found | None:
        """Return what a call finds; None, and a line among the errors, where it fails."""
        torch.manual_seed(0)
        begun = time.perf_counter()
        try:
            if begun > self.deadline:
                raise TimeoutError("no time left")
            found = call()
        except Exception as error:  # of any kind: the next may be of another kernel
            traceback.print_exc()
            self.errors.append(f"{_name(call)}: {type(error).__name__}: {error}"[:500])
            return None
        print(f"{time.perf_counter() - begun:6.1f} s {_name(call)}", file=sys.stderr, flush=True)
        return found


def measure(
    shape: Shape, ceilings: Ceilings, attempts: Attempts, batches: Iterable[int] = BATCHES
) -> Iterator[dict[str, Any]]:
    """Yield the report as it grows; what fails is null, and a line among the errors.

    This layer's checks come first, those of other heads last: what matters most is there
    if time runs out.
    """
    run = attempts.run
    found: dict[str, Any] = {"kernels": [], "decode_attention": [], "tuning": []}
    found["checks"] = [run(check) for check in gpu_checks.own_checks(shape)]
    found["prefill"] = run(partial(gpu_prefill.scoring_share, shape))
    yield _report(shape, ceilings, attempts, found)
    found["kernels"] = [run(call) for call in kernel_calls(shape, ceilings)]
    yield _report(shape, ceilings, attempts, found)
    decode = [partial(gpu_speed.decode_attention, shape, ceilings, batch) for batch in batches]
    found["decode_attention"] = [run(call) for call in decode]
    yield _report(shape, ceilings, attempts, found)
    found["checks"] += [run(check) for check in gpu_checks.other_checks(shape)]
    found["tuning"] = [run(call) for call in tuning_calls(shape, ceilings)]
    yield _report(shape, ceilings, attempts, found)


def _report(
    shape: Shape, ceilings: Ceilings, attempts: Attempts, found: dict[str, Any]
) -> dict[str, Any]:
    details = {"shape": asdict(shape), "ceilings": asdict(ceilings)}
    return {
        "benchmark": "gpu",
        "quick": False,
        "headline": headline(found["checks"], found["kernels"], found["prefill"]),
        "meaning": MEANING,
        "details": details | found | {"errors": attempts.errors},
    }


def kernel_calls(shape: Shape, ceilings: Ceilings) -> list[Callable[[], dict[str, Any]]]:
    """Return the measurements of single kernels."""
    plain = (
        gpu_speed.window_scores,
        gpu_speed.replay_scores,
        gpu_speed.tier_ranks,
        gpu_speed.pack,
    )
    return [
        partial(gpu_speed.value_norm, shape, ceilings, "l1"),
        partial(gpu_speed.value_norm, shape, ceilings, "l2"),
        *(partial(measurement, shape, ceilings) for measurement in plain),
        partial(gpu_speed.quantize, shape, ceilings, 8),
        partial(gpu_speed.quantize, shape, ceilings, 4),
    ]


def tuning_calls(shape: Shape, ceilings: Ceilings) -> list[Callable[[], dict[str, Any]]]:
    """Return the measurements of block sizes that a kernel might have."""
    return [
        partial(gpu_speed.value_norm_sizes, shape, ceilings, *sizes) for sizes in gpu_speed.SIZES
    ]


def headline(
    checks: list[dict[str, Any] | None],
    kernels: list[dict[str, Any] | None],
    prefill: dict[str, Any] | None,
) -> dict[str, float | None]:
    """Return the numbers that `MEANING` explains; None: not measured."""
    of_limit = {row["kernel"]: row["of_limit"] for row in kernels if row}
    share = prefill["share"] if prefill else {}
    return {
        "value_norm_vs_limit": of_limit.get("value_norm l1"),
        "window_scores_vs_limit": of_limit.get("window_scores"),
        "pack_vs_copy": of_limit.get("pack"),
        "scoring_share_32k": share.get("l1"),
        "scoring_share_32k_l2": share.get("l2"),
        "wrong_checks": sum(not (check and check["right"]) for check in checks),
    }


def _name(call: Any) -> str:
    """What a partial calls, and its short arguments."""
    short = [str(a) for a in call.args if isinstance(a, int | str | torch.dtype)]
    return " ".join([call.func.__name__, *short])


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, time."""
    import transformers
    import triton

    commit = ""
    with suppress(OSError):  # no git there
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    main(sys.argv[1])
