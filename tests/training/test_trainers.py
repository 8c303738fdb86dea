"""The trainer of a call follows from the model, the replicas of the view, and whether anything is saved."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import pytest

from lockstep.checkpoint.scheduler import Every, open_scheduler
from lockstep.checkpoint.store import Store
from lockstep.errors import ModelError, ScopeError
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.fit.mirrored import Mirrored
from lockstep.keras.fit.model_methods import ModelMethods
from lockstep.keras.fit.one_replica import Checkpointed, OneReplica, Outside
from lockstep.keras.fit.served import OutsideServed, Served, WithinServed
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker.job import Job, JobContext, by_itself

Made = Callable[..., tuple[Job, ModelMethods, keras.Model]]


@pytest.fixture
def made() -> Made:
    """Return a job of one worker, its methods, and a model that they have adopted."""

    def make(replicas: int, servers: int = 0) -> tuple[Job, ModelMethods, keras.Model]:
        view = place(replicas, (0,))
        settings = JobSettings(seed=7, replicas=replicas, parameter_servers=servers)
        own = Job(JobContext(0, Bus(SystemClock(), 0), settings), (view, by_itself(view)))
        methods = ModelMethods(own, adapter().steps())
        with methods.scope(nullcontext):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            methods.adopt(model)
        return own, methods, model

    return make


def test_replicas_share_a_call(made: Made) -> None:
    _, methods, model = made(3)
    assert type(methods._trainer(model)) is Mirrored
    other = keras.Sequential([keras.layers.Dense(1)])
    outside = methods._trainer(other)
    assert type(outside) is Outside
    with pytest.raises(ScopeError, match="was not compiled in the strategy's scope"):
        outside.call("fit", lambda *_: None, other)
    assert outside.call("predict_on_batch", lambda *_: 5, other) == 5


def test_one_replica_is_numbered_from_the_call_on_that_saves(made: Made, tmp_path: Path) -> None:
    own, methods, model = made(1)
    assert type(methods._trainer(model)) is OneReplica
    own.checkpoints.keep(open_scheduler(Store(tmp_path), Every(steps=1), lambda _: None))
    assert type(methods._trainer(model)) is Checkpointed
    own.checkpoints.finish()


def test_a_process_of_a_job_with_servers_has_one_replica_while_it_is_apart(made: Made) -> None:
    own, methods, model = made(3, servers=1)
    assert type(methods._trainer(model)) is Served
    assert type(methods._trainer(keras.Sequential([keras.layers.Dense(1)]))) is OutsideServed
    with own.apart():
        within = methods._trainer(model)
        assert type(within) is WithinServed
        with pytest.raises(ModelError, match="train_on_batch is not supported with parameter servers"):
            within.call("train_on_batch", lambda *_: None, model)
    assert type(methods._trainer(model)) is Served


def test_a_model_that_is_compiled_again_computes_with_its_new_loss(
    launch: Callable[..., Any], plain: Callable[..., str], tmp_path: Path
) -> None:
    done = launch(f"-n 1 --replicas 1 --checkpoint {tmp_path}", "compiled_twice.py")
    assert done.status == 0, done.stderr
    figures = [line for line in done.log(0) if line.startswith("figures ")]
    assert figures == plain("compiled_twice.py").splitlines()
