"""A Ray cluster of several nodes on this machine, which obeys the lines of its stdin.

    kill NODE       kills the processes of a node
    add             starts another node

It prints its address, then a line after each command.
"""

import sys
from typing import Any

from ray.cluster_utils import Cluster

_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def main(nodes: int) -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
    others = [cluster.add_node(**_NODE) for _ in range(nodes - 1)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["kill", number]:
                cluster.remove_node(others[int(number) - 1], allow_graceful=False)
            case ["add"]:
                others.append(cluster.add_node(**_NODE))
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
