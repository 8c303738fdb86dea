"""A Ray cluster of several nodes on this machine, which obeys the lines of its stdin.

    kill NODE       kills the processes of a node
    drain NODE      announces that a node will be preempted
    add             starts another node

It prints its address, then a line after each command.
"""

import subprocess
import sys
from typing import Any

from ray.cluster_utils import Cluster

_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def drain(address: str, node: str) -> None:
    words = f"drain-node --address {address} --node-id {node} --reason DRAIN_NODE_REASON_PREEMPTION"
    words += " --reason-message spot --deadline-remaining-seconds 600"
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *words.split()], check=True, stdout=sys.stderr
    )


def main(nodes: int) -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
    others = [cluster.add_node(**_NODE) for _ in range(nodes - 1)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["kill", number]:
                cluster.remove_node(others[int(number) - 1], allow_graceful=False)
            case ["drain", number]:
                drain(cluster.address, others[int(number) - 1].node_id)
            case ["add"]:
                others.append(cluster.add_node(**_NODE))
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
