"""A Ray cluster of several nodes on this machine, in a process that obeys the lines of its stdin.

    kill NODE               kills the processes of a node
    drain NODE              announces that a node will be preempted
    add [RESOURCE]          starts another node, with one of a resource
    raylet NODE SIGNAL      signals the raylet of a node
    gcs SIGNAL              signals the control store
    gcs start               starts it again

Node 0 is the head node. The process prints the cluster's address, and answers each command with a line: the
process ids of the raylets, by node.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
_STARTS = 3
_PATIENCE = 240.0


class RayCluster:
    """A cluster.

    Args:
        nodes: how many.
        folder: for what its processes write.
        keeps: whether its control store keeps its data in Redis.
        cpus: of each node.
    """

    def __init__(self, nodes: int, folder: Path, *, keeps: bool = False, cpus: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        self._redis = _Redis(folder) if keeps else None
        variables = {"RAY_USAGE_STATS_ENABLED": "0"} | (self._redis.variables if self._redis else {})
        for _ in range(_STARTS):
            with (folder / "log").open("wb") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(nodes), str(cpus)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | variables,
                )
            # On a machine with too much to do, a raylet may give up at its start.
            if address := self._line():
                break
            self._process.communicate()
        assert address, (folder / "log").read_text()
        self.address = address
        self._raylets: list[int] = []
        self.tell("list")

    def tell(self, command: str) -> None:
        """Have the cluster obey a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._raylets = json.loads(self._line())

    @property
    def nodes(self) -> int:
        """The number of nodes that there have been."""
        return len(self._raylets)

    def actors(self, kind: str, node: int | None = None) -> list[psutil.Process]:
        """The processes of the actors of a class, on a node or on all."""
        found: list[psutil.Process] = []
        for raylet in self._raylets if node is None else [self._raylets[node]]:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(raylet).children()
        return [process for process in found if f"ray::{kind}" in _title(process)]

    def close(self) -> None:
        """End the cluster."""
        self._process.communicate(timeout=_PATIENCE)
        if self._redis is not None:
            self._redis.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class _Redis:
    """What keeps the data of a control store."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.variables = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
            stdout=subprocess.DEVNULL,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE)


def has_redis() -> bool:
    """Whether a cluster can keep its data."""
    return shutil.which("redis-server") is not None


def _drain(address: str, node: str) -> None:
    words = f"drain-node --address {address} --node-id {node} --reason DRAIN_NODE_REASON_PREEMPTION"
    words += " --reason-message spot --deadline-remaining-seconds 600"
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *words.split()], check=True, stdout=sys.stderr
    )


def _serve(nodes: int, cpus: int) -> None:
    from ray.cluster_utils import Cluster

    node = {**_NODE, "num_cpus": cpus}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made = [cluster.head_node, *(cluster.add_node(**node) for _ in range(nodes - 1))]
    raylets = [one.all_processes["raylet"][0].process for one in made]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["kill", number]:
                cluster.remove_node(made[int(number)], allow_graceful=False)
            case ["drain", number]:
                _drain(cluster.address, made[int(number)].node_id)
            case ["add", *resources]:
                made.append(cluster.add_node(**node, resources=dict.fromkeys(resources, 1)))
                raylets.append(made[-1].all_processes["raylet"][0].process)
            case ["raylet", number, name]:
                raylets[int(number)].send_signal(getattr(signal, name))
            case ["gcs", "start"]:
                cluster.head_node.start_gcs_server()
            case ["gcs", "SIGKILL"]:
                cluster.head_node.kill_gcs_server()
            case ["gcs", name]:
                cluster.head_node.all_processes["gcs_server"][0].process.send_signal(getattr(signal, name))
        print(json.dumps([raylet.pid for raylet in raylets]), flush=True)
    for process in raylets:
        process.kill()
    cluster.shutdown()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
