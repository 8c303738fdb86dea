"""Runs the examples in the docstrings of public names; prints what it has found, as JSON.

An example says if it needs a job of two replicas: `lockstep run -n 1 --replicas 2` runs these. `python` runs
the others, or with the argument `jobs` those that start a job.
"""

import doctest
import json
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import lockstep

MODULES = ("lockstep", "lockstep.callbacks", "lockstep.cluster_resolver", "lockstep.errors", "lockstep.ray")
OF_TWO_REPLICAS = "In a job of two replicas"
STARTING_JOBS = ("lockstep.launch", "lockstep.ray.fit")
# In this order: the first one saves what the others load.
OF_CHECKPOINTS = ("lockstep.callbacks.Checkpoint", "lockstep.load_checkpoint", "lockstep.SidecarEvaluator")


class Checker(doctest.OutputChecker):
    """Ignores what Ray writes beside a program."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        own = [line for line in got.splitlines(keepends=True) if "(raylet)" not in line]
        return super().check_output(want, "".join(own), optionflags)


def public_objects() -> dict[str, Any]:
    found = {}
    for module in map(import_module, MODULES):
        names = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
        for name in names:
            value = getattr(module, name)
            if not isinstance(value, ModuleType | str):
                found[f"{module.__name__}.{name}"] = value
    return {name: found[name] for name in dict.fromkeys((*OF_CHECKPOINTS, *found))}


def main() -> None:
    # Before Keras is imported: a script need not import it itself.
    assert lockstep.get_strategy()
    replicas = lockstep.MultiWorkerMirroredStrategy().num_replicas_in_sync
    jobs = sys.argv[1:] == ["jobs"]
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(Checker())
    documented, with_examples = [], set()
    objects = public_objects()
    for name, value in objects.items():
        documented += [name] if value.__doc__ else []
        for test in finder.find(value, name, globs={}):
            with_examples |= {name} if test.examples else set()
            two = OF_TWO_REPLICAS in (test.docstring or "")
            if two == (replicas == 2) and (name in STARTING_JOBS) == jobs:
                runner.run(test)
    failed, attempted = runner.summarize()
    found = {"names": list(objects), "documented": documented, "with_examples": sorted(with_examples)}
    print(json.dumps(found | {"failed": failed, "attempted": attempted}))


main()
