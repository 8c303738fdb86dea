"""Installs what Lockstep replaces in Keras and its backend, and restores it; argument: a folder.

Fails where the registry of patches lacks a replacement, or a forked process does not train as plain Keras.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.keras import assignments, patches
from lockstep.keras.replica_run.runner import runner_of
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import downloads, jax_cache, tf_distribute_shim
from lockstep.worker.job import Job, JobContext, by_itself
from lockstep.worker.patch_registry import PATCHES

LIBRARIES = ("jax", "keras", "tensorflow", "torch")
OWN = str(Path(lockstep.__file__).parent)
VIEW = place(3, (0,))
JOB = Job(JobContext(0, Bus(SystemClock(), 0), JobSettings(seed=7, threads=1)), (VIEW, by_itself(VIEW)))

Attributes = dict[tuple[int, str], tuple[str, Any]]


def owners() -> Iterator[Any]:
    """Yield the modules of the libraries, and the classes in them."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in LIBRARIES]
    found: dict[int, Any] = {}
    for module in modules:
        if isinstance(module, ModuleType):
            found[id(module)] = module
            for value in vars(module).values():
                if isinstance(value, type) and str(value.__module__).partition(".")[0] in LIBRARIES:
                    found[id(value)] = value
    yield from found.values()


def attributes() -> Attributes:
    """Return all attributes that can be called, by the owner's id and their names."""
    return {
        (id(owner), name): (f"{owner.__name__}.{name}", value)
        for owner in owners()
        for name, value in list(vars(owner).items())
        if callable(value)
    }


def own(found: Attributes) -> set[tuple[int, str]]:
    """Return the attributes that are functions of Lockstep's."""
    return {
        at
        for at, (_, value) in found.items()
        if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(OWN)
    }


def install() -> None:
    patches.install(JOB)
    patches.install_at_compile(JOB)
    assignments.install()
    runner_of(JOB, lambda: 0)
    downloads.patch_get_file()


def check(before: Attributes) -> None:
    """Check that the differences from `before` are those in the registry."""
    now = attributes()
    changed = {at for at, (_, value) in now.items() if at in before and before[at][1] is not value}
    listed = {(id(patch.owner), patch.name) for patch in PATCHES if callable(patch.replacement)}
    differing = [now[at][0] for at in (changed | own(now)) ^ listed if at in now]
    assert not differing, differing
    assert len({(id(patch.owner), patch.name, id(patch.replacement)) for patch in PATCHES}) == len([*PATCHES])


def main() -> None:
    backend = keras.backend.backend()
    before = attributes()
    assert not own(before), [before[at][0] for at in own(before)]
    install()
    assert len([*PATCHES]) > 30
    check(before)
    installed = [*PATCHES]
    install()
    assert [*PATCHES] == installed
    if backend == "tensorflow":
        from lockstep.keras.tf_random_ops import drawn_from

        with drawn_from(None):
            check(before)
            replaced = [*PATCHES]
            assert len(replaced) > len(installed)
        with drawn_from(None):
            assert [*PATCHES] == replaced
        tf_distribute_shim.replace_names()
        tf_distribute_shim.refuse_strategies(3)
        check(before)
    if backend == "jax":
        jax_cache.keep_compiled(Path(sys.argv[1]), 1)
        check(before)
    for patch in PATCHES:
        print(patch.by.removeprefix("lockstep."), getattr(patch.owner, "__name__", "sys.modules"), patch.name)
    patches.uninstall()
    assert {patch.by.split(".")[1] for patch in PATCHES} == {"worker"}
    PATCHES.give_back("lockstep")
    now = attributes()
    assert not own(now), [now[at][0] for at in own(now)]
    changed = [text for at, (text, value) in before.items() if at in now and now[at][1] is not value]
    assert not changed, changed
    assert before.keys() <= now.keys()
    install()
    assert len([*PATCHES]) > 30
    train_as_in_a_forked_process()


def train_as_in_a_forked_process() -> None:
    """Train a model whose step the replicas of its worker have computed."""
    patches.install(JOB).adopt_all()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((6, 2), "float32")
    model.fit(x, x[:, :1], verbose=0)
    # In a process that is really forked, Keras might wait for threads of JAX.
    patches._note_fork()
    JOB.left = True
    model.fit(x, x[:, :1], verbose=0)
    assert model.predict(x, verbose=0).shape == (6, 1)
    assert not PATCHES.has("lockstep.keras.patches")


if __name__ == "__main__":
    main()
