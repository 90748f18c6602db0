"""Triton kernels without a GPU: interpreted on the CPU, or compiled ahead of time.

Triton decides when it is imported whether it interprets, so either happens in a process
of its own: `in_process` runs a test's own file as a script, which prints what it found.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEADLINE_S = 800
"""Of a process; below the tests' own timeout."""


def in_process(file: str, what: str, *, interpret: bool) -> dict[str, Any]:
    """Run `python file what` with tests/support on its path; return the JSON it prints."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, file, what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def built(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    capability: int,
    num_warps: int,
    num_stages: int,
    aligned: Sequence[int] = (),
) -> list[int]:
    """Compile for a GPU that need not be there.

    Args:
        kernel: a `triton.jit` function, not interpreted.
        signature: types of the run-time arguments, such as "*bf16", by name.
        constants: values of the compile-time arguments, by name.
        capability: 80 for sm_80.
        num_warps: of the launch.
        num_stages: of the launch.
        aligned: positions of arguments that are multiples of 16.

    Returns:
        [registers per thread, bytes of local memory per thread (spills), bytes of shared
        memory].
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    assert signature.keys() <= types.keys()
    divisible = {(i,): [["tt.divisibility", 16]] for i in aligned}
    compiled = triton.compile(
        ASTSource(kernel, types, constants, divisible),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return [*_usage(file.name), compiled.metadata.shared]


def _usage(cubin: str) -> tuple[int, int]:
    """(registers per thread, bytes of local memory) by the tool that comes with Triton."""
    from triton.knobs import nvidia

    text = subprocess.run(
        [nvidia.cuobjdump.path, "--dump-resource-usage", cubin],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2]) + int(found[3])
