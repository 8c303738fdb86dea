"""All measurements of `make bench`. BACKENDS names Keras backends, or all; by default only JAX."""

import os

import allreduce
import budget
import checkpoints
import comparison
import events
import footprint
import hosts_losses
import hosts_reduce
import hosts_training
import input as input_cost
import joining
import launching
import many_hosts
import many_steps
import overhead
import parameter_server
import placement
import ray_losses
import reading
import recording
import recovery
import scaling
import strangers
import training
import verification
import watching
import whole_batch
from models import COMPARED
from programs import PEERS


def main() -> None:
    allreduce.main()
    print()
    hosts_reduce.main()
    hosts_training.main()
    for rate, steps in (("1gbit", 10), ("100mbit", 3)):
        hosts_training.main(turns=4, steps=steps, rate=rate)
    hosts_losses.main()
    many_hosts.main()
    strangers.main()
    names = os.environ.get("BACKENDS") or "jax"
    backends = list(PEERS) if names == "all" else names.split()
    for backend in backends:
        print()
        budget.main(backend, "cnn", workers=2, replicas=2, turns=budget.TURNS)
        for model in COMPARED:
            print()
            training.main(backend, model)
        print()
        training.main(backend, further=True)
        for replicas in (2, 4):
            print()
            reading.main(backend, replicas)
        print()
        reading.main(backend, over_hosts=True)
        print()
        footprint.main(backend, tuple(footprint.ROWS) if backend == "jax" else ("memory", "eight"))
    print()
    launching.main(backends)
    for backend in backends:
        print()
        comparison.main(backend)
    # The last measurement pins this process.
    for other in (
        placement,
        scaling,
        overhead,
        recording,
        verification,
        watching,
        events,
        recovery,
        joining,
        ray_losses,
        parameter_server,
        checkpoints,
        input_cost,
        many_steps,
        whole_batch,
    ):
        print()
        other.main()


if __name__ == "__main__":
    main()
