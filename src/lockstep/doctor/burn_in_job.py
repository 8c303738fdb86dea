"""A program that burns in the hosts of a job. Its chief prints the results of each host as JSON.

lockstep run --hosts A,B --no-adopt ... -m lockstep.doctor.burn_in_job SECONDS
"""

import sys

import msgspec

from lockstep.doctor.burn_in import CoreResults, burn_in
from lockstep.doctor.check import Sources
from lockstep.system.environment import environment_at_start, keras_backend
from lockstep.system.notes import note
from lockstep.worker import job


def main(seconds: float) -> None:
    """Burn in this host; print the results of all hosts."""
    current = job.current()
    backend, _ = keras_backend()
    # `lockstep run` gives each worker the variable.
    assert backend is not None
    results = burn_in(backend, seconds, Sources(environment=environment_at_start()), note)
    gathered = current.communicator.gather(msgspec.json.encode((current.context.host, results)))
    if job.is_chief():
        pairs = [msgspec.json.decode(blob, type=tuple[str, CoreResults]) for blob in gathered]
        print(msgspec.json.encode(dict(pairs)).decode())


if __name__ == "__main__":
    main(float(sys.argv[1]))
