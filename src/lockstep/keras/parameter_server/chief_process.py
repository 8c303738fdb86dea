"""The chief in a call of `fit`: runs Keras's loop, whose steps the workers compute.

A step of the chief's loop waits for the next step that a worker completes, in the order of completion. The
batches of the loop are read only to compare them with those of the workers, and to know where epochs end.

Within an epoch, the chief's model has old weights. It gets the present ones from the servers at the end of
each epoch, or when a callback stops training, while no step is in progress. So callbacks at epoch ends, and
evaluations, see the same weights as the servers. Changes by these callbacks are written to the servers before
the next epoch begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.errors import DisagreementError, ModelError
from lockstep.keras.backends.contract import VARIABLE
from lockstep.keras.input.readings import read_batch
from lockstep.keras.parameter_server.chief import Chief
from lockstep.keras.parameter_server.dispatcher import as_arrays
from lockstep.keras.parameter_server.followed_orders import FollowedOrders
from lockstep.keras.parameter_server.process import FitProcess, ServedCall
from lockstep.keras.parameter_server.reading_states import ReadingStates
from lockstep.keras.parameter_server.served_optimizers import slots_of
from lockstep.keras.parameter_server.server_embedding import server_layers, with_zero_rows
from lockstep.keras.parameter_server.servers import same_bits
from lockstep.keras.private.common import embedding_table, rate_object
from lockstep.keras.randomness import random_states
from lockstep.keras.state.snapshots import Part

Array = npt.NDArray[Any]


class ChiefProcess(FitProcess):
    """Runs callbacks and evaluations, and lets workers compute the steps.

    Attributes:
        reading: the random states that the input draws from.
    """

    reading: ReadingStates

    def __init__(self, served: ServedCall) -> None:
        super().__init__(served, "chief")
        self._steps = 0
        self._counted: int | None = None
        self._program = self.program()
        self._written: set[int] = set()
        self._last = False
        self._current = True
        self._callbacks_ran = False
        self._of_execution = 0
        self._unadded: list[Mapping[str, Array]] = []
        self._rate: int | None = None
        self._opening: int | None = None
        self._checks: dict[int, bytes] = {}
        self._learned_others: list[Array] = []
        self._chief = Chief(self, served.options.max_staleness, self.orders())
        self._dispatcher, self._served_state = self._chief.dispatcher, self._chief.served_state
        self._server_layers = server_layers(self.model)

    def train(
        self,
        keras_fit: Callable[[Sequence[Any]], Any],
        training: Any,
        callbacks: Sequence[Any],
        steps_per_epoch: int | None,
    ) -> None:
        """Run Keras's loop.

        Raises:
            PeerLostError: a server or all workers have ended.
        """
        # Keras takes whole executions, which may be more steps.
        several = self.model.steps_per_execution
        self._steps_per_epoch = -(-steps_per_epoch // several) * several if steps_per_epoch else None
        self._chief.begin(self.served.shards)
        self._servers = self._chief.servers
        self._served_state.slots = list(slots_of(self.model.optimizer, self.model.trainable_variables))
        weights, values = self._values(None)
        self._served_state.weights = [np.array(value) for value in weights]
        self._served_state.values = [np.array(value) for value in values]
        self._learned_others = self._others(None)
        self._first_others, self._random = self._learned_others, random_states(self.call.held_by_inputs)
        self.reading = ReadingStates(self.call.held.values())
        batches = training.batches
        training.batches = lambda: self.one_ahead(self.reading.read(batches), training.num_batches)
        with self.job.apart():
            if self.tables is not None:
                self.tables.within = self._servers.channels
            self.served.install(self._next_step)
            keras_fit([*callbacks, _ChiefEnd(self)])
            self.reading.resume()
            # Workers may have been assigned steps beyond the last one. These are also part of the order.
            self._dispatcher.drain()
            self._chief.end()
        self.call.steps = self._steps

    def orders(self) -> FollowedOrders | None:
        """Return the orders that this process follows if it also computes the steps; see `Chief`."""
        return None

    def close(self) -> None:
        """Leave the call."""
        super().close()
        self._chief.close()

    def updated_rows(self) -> dict[int, tuple[Array, list[Any]]]:
        """Return the rows of each table that this call has updated, and the variables that have such rows.

        These variables are the table and its slots. Their other rows have their values from before the call.
        The key is the position of the table among the trainable variables.
        """
        weights = zip(self.model.trainable_variables, self._served_state.weights, strict=True)
        values_of: dict[int, list[tuple[Any, Array]]] = {i: [pair] for i, pair in enumerate(weights)}
        slots = zip(
            self._served_state.slots, self.model.optimizer.variables, self._served_state.values, strict=True
        )
        for (position, _), variable, value in slots:
            values_of.setdefault(position, []).append((variable, value))
        return {
            table: (rows, [variable for variable, _ in values_of[table]])
            for table, rows in self._servers.updated_rows.items()
            # A callback may have changed other rows since then, for example at the end of training.
            if table not in self._written
            and all(
                same_bits(self.backend.to_numpy(variable.value), value)
                for variable, value in values_of[table]
            )
        }

    def begin_epoch(self, epoch: int) -> None:
        """Let the workers begin an epoch when the loop takes its first step."""
        self._opening = epoch

    def end_batch(self) -> None:
        """Read the present weights if a callback of a batch has stopped training within an epoch."""
        self._callbacks_ran = True
        if not self.model.stop_training or self._current:
            return
        self._dispatcher.drain()
        variables, state = self._groups(), None
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
            state = tuple([variable.value for variable in group] for group in variables)
        state = self._pulled(state)
        for group, values in zip(variables, state or (), strict=False):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    def _groups(self) -> tuple[list[Any], ...]:
        """Return the variables whose values Keras threads through its steps on JAX, in the same groups."""
        model = self.model
        optimizer = model.optimizer.variables
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer,
            model.metrics_variables,
        )

    def one_ahead(self, batches: Iterator[Any], count: int | None) -> Iterator[Any]:
        """Yield the batches of a pass, and note whether each is the last one of its epoch.

        To detect the last one, the next batch is read, but none beyond the number of batches that Keras
        knows. Workers do not read further either, because a sampler that is asked for more would draw the
        order of another pass.

        Args:
            batches: the batches of the pass.
            count: their number, if it is known.
        """
        expected_count, steps = count or self._counted, self._steps_per_epoch
        read = 0
        batch = next(batches, None)
        while batch is not None:
            read += 1
            if read == expected_count or (steps and read % steps == 0):
                self._last = True
                yield batch
                batch = next(batches, None)
            else:
                ahead = next(batches, None)
                self._last = ahead is None
                yield batch
                batch = ahead
        # Keras also counts the batches of the first pass if it does not know their number.
        self._counted = read

    def _next_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Return (logs, state) of the next completed step.

        With steps_per_execution, Keras uses only the logs of the last step of an execution. So the other
        steps have none, and the metrics of all its steps are added there.
        """
        step, self._steps = self._steps, self._steps + 1
        timer = self.job.timer
        timer.begin(self.call.name)
        if self.tables is not None:
            self.tables.closed = f"call the model at the end of an epoch of {self.call.name}"
        if step == 0:
            with with_zero_rows(self.model):
                self.computed(self._program, state, step, batch)
            self._dispatcher.set_layers(as_arrays(self._program.layers(state), self.backend.to_numpy))
        if self._opening is None:
            if self._callbacks_ran:
                self._refuse_another_rate(state)
        else:
            self._write_changes(state)
            self._dispatcher.open(self._opening)
        if self._opening is not None or self._callbacks_ran:
            # With steps_per_execution, callbacks do not run after each step.
            self._of_execution = 0
        self._opening, self._callbacks_ran = None, False
        data = read_batch(batch)
        self._checks[step] = data.check()
        timer.lap("input")
        result = self._dispatcher.result()
        timer.lap("wait")
        self._unadded.append(result)
        self._of_execution += 1
        logs = None
        if self._of_execution == self.model.steps_per_execution or self._last:
            logs, state = self._program.finish(state, self._unadded)
            self._unadded.clear()
        timer.lap("update")
        self.job.note_step()
        self._compare_batches()
        self._current = self._last
        if self._current:
            state = self._pulled(state)
            self._learned_others = self._others(state)
            timer.lap("exchange")
        timer.end(step + 1, logs, trained=self.served.trained + step + 1, examples=data.examples)
        if self.recorded is None:
            self.job.joiners.admit(self._for_joiners)
        else:
            self.job.joiners.admit_none("a replay has the processes of its run")
        return logs, state

    def _for_joiners(self, whole: bool) -> Contents:
        """Return the state for workers that join, or only the position.

        The weights at the end of the last epoch are enough: a worker pulls the present weights with each
        step, and at the end of the call all processes get the final weights (of tables, the updated rows).
        The other variables, such as the states of random generators, have their values from the beginning of
        the call, from which a worker computes any step.
        """
        weights = zip(self.model.trainable_variables, self._served_state.weights, strict=True)
        slots = zip(self.model.optimizer.variables, self._served_state.values, strict=True)
        others = zip(self.model.non_trainable_variables, self._first_others, strict=True)
        parts = {
            "steps": Part(lambda: self._steps),
            "random": Part(lambda: self._random),
            "peers": Part(self.mesh.peers),
        }
        return self.served.take_snapshot(whole, parts, [*weights, *slots, *others])

    def _compare_batches(self) -> None:
        """Check that workers have read the same batches as this process.

        Raises:
            DisagreementError: a worker has read a different batch.
        """
        for step in list(self._checks):
            if (worker_and_check := self._dispatcher.pop_check(step)) is None:
                continue
            worker, check = worker_and_check
            if check != self._checks.pop(step):
                raise DisagreementError(
                    f"step {step + 1} of {self.call.name}: worker {worker} has read a different batch "
                    "from the chief; give all processes the same data in the same order: seed generators and "
                    "shuffles, and pass a fresh iterator to each fit"
                )

    def _refuse_another_rate(self, state: Any) -> None:
        """Raise ModelError if a callback has changed the learning rate within an epoch."""
        rate = rate_object(self.model.optimizer)
        if not isinstance(rate, keras.Variable):
            return
        if self._rate is None:
            self._rate = next(
                i for i, variable in enumerate(self.model.optimizer.variables) if variable is rate
            )
        index = self._rate
        now = self.backend.to_numpy(rate.value if state is None else state[2][index])
        if now.tobytes() != self._served_state.values[index].tobytes():
            raise ModelError(
                "a callback changes the learning rate within an epoch, which parameter servers do not "
                "support: use a keras.optimizers.schedules.LearningRateSchedule, or change it at the "
                "beginning or end of epochs"
            )

    def _values(self, state: Any) -> tuple[list[Array], list[Array]]:
        """Return the weights and the optimizer's variables; the arrays may be their memory."""
        groups: Sequence[Any] = self.model.trainable_variables, self.model.optimizer.variables
        if state is None:
            groups = tuple([variable.value for variable in group] for group in groups)
        else:
            groups = state[0], state[2]
        weights, slots = ([self.backend.to_numpy(value) for value in group] for group in groups)
        return weights, slots

    def _others(self, state: Any) -> list[Array]:
        """Return the non-trainable variables."""
        values = state[1] if state is not None else [v.value for v in self.model.non_trainable_variables]
        return [np.array(self.backend.to_numpy(value)) for value in values]

    def _pulled(self, state: Any) -> Any:
        """Return the state with the values of the servers and the dispatcher, while no step is in work."""
        served_state = self._served_state
        served_state.read(self._servers, self._steps)
        if self.tables is not None:
            self._dispatcher.set_layers(self._digests())
            self.tables.closed = ""
        return self._program.put(state, served_state.weights, self._dispatcher.layers, served_state.values)

    def _digests(self) -> dict[str, Array]:
        """Return the digests of tables that only servers have, by their names in the layers' state."""
        weights = [id(variable) for variable in self.model.trainable_variables]
        others = [id(variable) for variable in self.model.non_trainable_variables]
        digests = {}
        for layer in self._server_layers:
            digest = self._servers.digests[weights.index(id(embedding_table(layer)))]
            position = others.index(id(layer.digest_variable))
            name = self._program.layer_of(position) or f"{VARIABLE}/{position}"
            digests[name] = digest.view(np.int32)
        return digests

    def _write_changes(self, state: Any) -> None:
        """Give servers and workers the variables that the program has changed since the last epoch."""
        others, metrics = self._others(state), {id(variable) for variable in self.model.metrics_variables}
        changed_layers = {}
        for i, (old, new) in enumerate(zip(self._learned_others, others, strict=True)):
            if not same_bits(old, new) and id(self.model.non_trainable_variables[i]) not in metrics:
                changed_layers[self._program.layer_of(i) or f"{VARIABLE}/{i}"] = new
        if changed_layers:
            self._dispatcher.set_layers(changed_layers)
        self._learned_others = others
        changed, slots = self._served_state.write_changes(self._servers, self._steps, *self._values(state))
        self._written |= {*changed, *(position for position, _ in slots)}


class _ChiefEnd(keras.callbacks.Callback):  # type: ignore[misc]
    """The last callback of the chief."""

    def __init__(self, chief: ChiefProcess) -> None:
        super().__init__()
        self._chief = chief

    def on_test_end(self, logs: Any = None) -> None:
        """Continue with the input's random states."""
        self._chief.reading.resume()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Prepare to open the epoch."""
        self._chief.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Read the weights if the training stops here."""
        self._chief.end_batch()
