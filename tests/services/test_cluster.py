"""The local cluster: loopback only, our package in its workers, nothing left behind.

Runs in a process of its own: Ray reads its address switch when it is first imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from criticalkv.services.cluster import _end

# Two deployments as the application has them; prints what a test wants to know.
APPLICATION = """
    import signal, socket, sys, urllib.request
    from pathlib import Path
    from criticalkv.services import cluster
    from criticalkv.services.cluster import start_cluster
    from criticalkv.services.loopback import on_loopback
    from criticalkv.shared.config import load_config

    end = cluster._end
    def tell(processes):
        print(*(process.pid for process in processes), flush=True)
        end(processes)
    cluster._end = tell

    class Back:
        async def where(self):
            from criticalkv.shared import identity
            return identity.__file__

    class Front:
        def __init__(self, back):
            self.back = back
        def __serve_build_asgi_app__(self):
            from fastapi import FastAPI
            app = FastAPI()
            @app.get("/")
            async def where():
                return await self.back.where.remote()
            return app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with start_cluster(load_config(overrides={"gateway": {"port": port}})):
        from ray import serve
        small = {"num_cpus": 0.1}
        back = serve.deployment(on_loopback(Back), name="back", ray_actor_options=small).bind()
        front = serve.deployment(
            serve.ingress()(on_loopback(Front)), name="front", ray_actor_options=small
        ).bind(back)
        serve.run(front, name="probe")
        answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/").read().decode()
        print("READY", answer, flush=True)
        signal.pause()
"""


def descendants(pid: int) -> set[int]:
    """All live processes below pid, by the kernel's parent table."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found


def listeners(pids: set[int]) -> list[str]:
    """Local addresses, as the kernel writes them, of these processes' TCP listeners."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


LOOPBACK = {
    "0100007F",  # 127.0.0.1
    "0000000000000000FFFF00000100007F",  # ::ffff:127.0.0.1
    "00000000000000000000000001000000",  # ::1
}


def directories() -> set[Path]:
    return set(Path("/tmp").glob("ckv-*"))


def await_end(pids: set[int], seconds: float) -> set[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = {pid for pid in pids if pid in descendants(1) and Path(f"/proc/{pid}").exists()}
        if not alive:
            return alive
        time.sleep(0.1)
    return alive


@pytest.fixture
def cluster() -> Iterator[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(APPLICATION)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
)
def test_listens_on_loopback_only_and_leaves_nothing(
    cluster: subprocess.Popen[str], number: signal.Signals, to_group: bool
) -> None:
    before = directories()
    assert cluster.stdout is not None
    answer = cluster.stdout.readline()
    assert answer.startswith("READY"), answer
    assert "identity.py" in answer  # the installed package, without any working_dir
    family = descendants(cluster.pid)
    agents = {p for p in family if "Agent" in Path(f"/proc/{p}/cmdline").read_text()}
    assert len(agents) == 2, "Ray's agents are what may stay"
    addresses = listeners(family)
    assert len(addresses) > 5, "the test must see Ray's sockets"
    assert set(addresses) <= LOOPBACK
    made = directories() - before
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700]
    if to_group:
        os.killpg(cluster.pid, number)
    else:
        cluster.send_signal(number)
    cluster.wait(30)
    assert agents <= set(map(int, cluster.stdout.readline().split())), "not all are waited for"
    assert await_end(family, 10.0) == set()
    assert directories() <= before


def test_what_outlives_the_cluster_is_killed_and_what_ends_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An agent of Ray's may wait a minute for a cluster that has gone."""
    monkeypatch.setattr("criticalkv.services.cluster.END_S", 2.0)
    ends = f"import time; time.sleep(0.5); open({str(tmp_path / 'ended')!r}, 'w')"
    stays = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in (ends, stays)]
    _end([psutil.Process(child.pid) for child in children])
    assert (tmp_path / "ended").exists()
    assert not any(psutil.pid_exists(child.pid) for child in children)
    for child in children:
        child.wait(0)


@pytest.mark.parametrize("after_s", [1.0, 4.0])
def test_an_interrupted_start_leaves_nothing(
    cluster: subprocess.Popen[str], after_s: float
) -> None:
    time.sleep(after_s)
    family = descendants(cluster.pid)
    cluster.send_signal(signal.SIGINT)
    cluster.wait(30)
    assert await_end(family, 10.0) == set()
