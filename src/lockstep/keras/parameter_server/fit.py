"""A call of `fit` with parameter servers, in the chief, a worker or a server.

All processes run the same script. They enter `fit` with the same state, and leave it with the same state.
Within it, the servers have the weights. The chief and the workers each run Keras's loop over the same
batches. A worker computes the steps that the chief assigns to it. A step of the chief's loop is the next
completed one. Between the epochs no step is in progress, so the chief evaluates, and calls the callbacks,
with the weights of that moment.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.checkpoint import values
from lockstep.errors import PeerLostError
from lockstep.keras.parameter_server.chief_process import ChiefProcess
from lockstep.keras.parameter_server.one_process import OneProcess
from lockstep.keras.parameter_server.process import ServedCall
from lockstep.keras.parameter_server.served_optimizers import refuse_buffers, refuse_unserved
from lockstep.keras.parameter_server.server_embedding import server_layers
from lockstep.keras.parameter_server.server_process import ServerProcess
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.keras.parameter_server.server_tables import tables_of_job
from lockstep.keras.parameter_server.worker_process import WorkerProcess
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.keras.state.callback_states import callback_states, listeners, set_callback_states
from lockstep.keras.variables import assign, step_state
from lockstep.keras.worker_exchange import Packed, gather, pack, unpack

Array = npt.NDArray[Any]


def fit_on_servers(
    served: ServedCall, original: Callable[..., Any], bound: Any, training: Any, callbacks: Sequence[Any]
) -> Any:
    """Run a call of `fit`, in each process of the job, and return the history.

    Args:
        served: the call.
        original: Keras's `fit`.
        bound: its arguments.
        training: the input, which yields global batches.
        callbacks: the callbacks of the program.

    Raises:
        ModelError: parameter servers do not support the model.
        PeerLostError: the chief, a server or all workers have ended.
        PeerStuckError: a process has not answered in time.
    """
    refuse_unserved(served.model, served.shards)
    refuse_buffers(served.backend.training_state(served.model))
    task = served.task
    arguments = bound.arguments
    arguments.update(x=training, y=None, sample_weight=None, class_weight=None, validation_split=0.0)

    def keras_fit(callbacks: Sequence[Any]) -> Any:
        arguments.update(callbacks=list(callbacks))
        return original(*bound.args, **bound.kwargs)

    updated: Mapping[int, tuple[Array, list[Any]]] = {}
    if task == "ps":
        # One step at a time is plain Keras.
        plain = served.options.max_staleness == 0
        variables = partial(ServedVariables, served.backend, plain=plain)
        with ServerProcess(served.job, served.call, variables, served.trained) as server:
            server.tables = tables_of_job(served.job) if server_layers(served.model) else None
            server.open()
            server.add(served.update, served.shards, served.tables.variables)
            with served.job.apart():
                server.serve()
    elif task == "chief":
        process = OneProcess if served.job.settings.in_one_process else ChiefProcess
        with process(served) as chief:
            chief.train(keras_fit, training, callbacks, arguments["steps_per_epoch"])
            updated = chief.updated_rows()
    else:
        arguments.update(validation_data=None, verbose=0)
        with WorkerProcess(served) as worker:
            worker.train(keras_fit, arguments)
    return _shared(served, callbacks, updated)


def _shared(
    served: ServedCall, callbacks: Sequence[Any], updated: Mapping[int, tuple[Array, list[Any]]]
) -> Any:
    """Give the chief's state, with its callbacks and generators, to all processes, and return the history.

    Args:
        served: the call.
        callbacks: the callbacks of the program.
        updated: see `ChiefProcess.updated_rows`.
    """
    job, model, call = served.job, served.model, served.call
    is_chief = served.task == "chief"
    blob = b""
    if is_chief:
        rows = {id(variable): numbers for numbers, variables in updated.values() for variable in variables}
        state = []
        for name, variable in step_state(model).items():
            value, numbers = served.backend.to_numpy(variable.value), rows.get(id(variable))
            packed_rows = None if numbers is None else pack("rows", numbers)
            state.append((pack(name, value if numbers is None else value[numbers]), packed_rows))
        of_callbacks = callback_states(listeners(call.callbacks, model), call.callback_hashes)
        # Only the chief has drawn the random numbers that plain Keras draws in `fit`.
        kept, arrays = values.pack(
            {
                "callbacks": of_callbacks,
                "random": random_states(call.held_by_inputs),
            },
            "chief",
        )
        packed = [pack(name, array) for name, array in arrays.items()]
        blob = msgspec.msgpack.encode((state, kept, packed, call.steps, bool(model.stop_training)))
    label = f"the end of {call.name}"
    blobs = job.exchange(lambda _, communicator: gather(job.worker, communicator, label, {}, blob))
    if not is_chief:
        chief_blob = next(filter(None, blobs), None)
        if chief_blob is None:
            raise PeerLostError(f"{label}: the chief was lost before it gave its state to the others")
        state, kept, packed, call.steps, model.stop_training = msgspec.msgpack.decode(
            chief_blob, type=tuple[list[tuple[Packed, Packed | None]], Any, list[Packed], int, bool]
        )
        variables = step_state(model)
        # A server has not created the variables of metrics.
        arrays = {}
        for packed_array, of_rows in state:
            name, array = unpack(packed_array)
            if name in variables:
                arrays[name] = (
                    array if of_rows is None else _with_rows(served, variables[name], of_rows, array)
                )
        assign(model, arrays)
        model.history = keras.callbacks.History()
        model.history.set_model(model)
        chiefs = values.unpack(kept, dict(map(unpack, packed)))
        set_callback_states(listeners(callbacks, model), chiefs["callbacks"])
        set_random_states(chiefs["random"], call.held_by_inputs)
    return model.history


def _with_rows(served: ServedCall, variable: Any, numbers: Packed, rows: Array) -> Array:
    """Return the value of a variable with some of its rows replaced."""
    value = np.array(served.backend.to_numpy(variable.value))
    value[unpack(numbers)[1]] = rows
    return value
