"""The chief in a call of `fit`: runs Keras's loop, whose steps the workers compute."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.errors import DisagreementError, ModelError
from lockstep.keras.backends.contract import VARIABLE
from lockstep.keras.input.readings import read_batch
from lockstep.keras.parameter_server.dispatcher import Dispatcher, as_arrays
from lockstep.keras.parameter_server.process import FitProcess, ServedCall
from lockstep.keras.parameter_server.reading_states import ReadingStates
from lockstep.keras.parameter_server.served_variables import slots_of
from lockstep.keras.parameter_server.server_embedding import server_layers, with_zero_rows
from lockstep.keras.parameter_server.servers import KnownState, Servers, same_bits
from lockstep.keras.private.common import embedding_table, given_rate
from lockstep.keras.randomness import random_states
from lockstep.keras.state.snapshots import KnownApart

Array = npt.NDArray[Any]


class ChiefProcess(FitProcess):
    """Runs callbacks and evaluations, and lets workers compute the steps.

    Attributes:
        reading: the random states from which the input draws.
    """

    reading: ReadingStates

    def __init__(self, served: ServedCall) -> None:
        super().__init__(served, "chief")
        self._steps = 0
        self._counted: int | None = None
        self._program = self.program()
        self._known = KnownState()
        self._written: set[int] = set()
        self._last = False
        self._current = True
        self._callbacks_ran = False
        self._rate: int | None = None
        self._opening: int | None = None
        self._checks: dict[int, bytes] = {}
        self._known_others: list[Array] = []
        self._dispatcher: Dispatcher | None = None
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
        self._steps_per_epoch = steps_per_epoch
        self._dispatcher = self.begin()
        self._known.slots = list(slots_of(self.model.optimizer, self.model.trainable_variables))
        self._known.weights, self._known.values = self._values(None)
        self._known_others = self._others(None)
        self._first_others, self._random = self._known_others, random_states(self.call.held_by_inputs)
        self.reading = ReadingStates(self.call.held.values())
        batches = training.batches
        training.batches = lambda: self.one_ahead(self.reading.read(batches), training.num_batches)
        with self.job.apart():
            self._servers = self.reach_servers()
            if self.tables is not None:
                self.tables.within = self._servers.channels
            self._dispatcher.silent = self._servers.silent
            self.served.install(self._take)
            keras_fit([*callbacks, _ChiefEnd(self)])
            self.reading.resume()
            # Workers may have been assigned steps beyond the last one: these are part of the order, too.
            self._dispatcher.drain()
            self.end(self._dispatcher, self._servers)
        self.call.steps = self._steps

    def begin(self) -> Dispatcher:
        """Let workers connect."""
        dispatcher = Dispatcher(self.dispatched(self.served.options.max_staleness))
        # Closed also if the processes do not meet.
        self._dispatcher = dispatcher
        dispatcher.start()
        self.meet(dispatcher.put)
        dispatcher.keep(self.mesh.workers)
        return dispatcher

    def reach_servers(self) -> Servers:
        """Connect to all servers."""
        return self.connect_servers(self.served.shards)

    def close(self) -> None:
        """Leave the call."""
        super().close()
        if self._dispatcher is not None:
            self._dispatcher.close()

    def updated_rows(self) -> dict[int, tuple[Array, list[Any]]]:
        """Return the rows of tables that this call has updated, and the variables that have such rows.

        These are a table and its slots, whose other rows have the values from before the call. The key is the
        position of the table among the trainable variables.
        """
        weights = zip(self.model.trainable_variables, self._known.weights, strict=True)
        found: dict[int, list[tuple[Any, Array]]] = {i: [pair] for i, pair in enumerate(weights)}
        slots = zip(self._known.slots, self.model.optimizer.variables, self._known.values, strict=True)
        for (position, _), variable, known in slots:
            found.setdefault(position, []).append((variable, known))
        return {
            table: (rows, [variable for variable, _ in found[table]])
            for table, rows in self._servers.updated_rows.items()
            # A callback may have changed other rows since, for example at the end of the training.
            if table not in self._written
            and all(
                same_bits(self.backend.to_numpy(variable.value), known) for variable, known in found[table]
            )
        }

    def begin_epoch(self, epoch: int) -> None:
        """Let the workers begin an epoch once its first step is taken."""
        self._opening = epoch

    def end_batch(self) -> None:
        """After the callbacks of a batch: take the present weights if one stops the training in an epoch."""
        self._callbacks_ran = True
        if not self.model.stop_training or self._current:
            return
        assert self._dispatcher is not None
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

        To see that, the next one is read, but none beyond the number of batches that Keras knows: workers
        read no further either, and a sampler that is asked for more draws the order of another pass.

        Args:
            batches: of the pass.
            count: their number, if it is known.
        """
        known, steps = count or self._counted, self._steps_per_epoch
        read = 0
        batch = next(batches, None)
        while batch is not None:
            read += 1
            if read == known or (steps and read % steps == 0):
                self._last = True
                yield batch
                batch = next(batches, None)
            else:
                ahead = next(batches, None)
                self._last = ahead is None
                yield batch
                batch = ahead
        # Keras counts the batches of the first pass if it does not know their number.
        self._counted = read

    def _take(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Return (logs, state) of the next completed step."""
        assert self._dispatcher is not None
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
            self._opening = None
        # With steps_per_execution, none runs before the next step.
        self._callbacks_ran = False
        data = read_batch(batch)
        self._checks[step] = data.check()
        timer.lap("input")
        result = self._dispatcher.result()
        timer.lap("wait")
        logs, state = self._program.finish(state, result)
        timer.lap("update")
        self.job.note_step()
        self._compare_batches()
        self._current = self._last
        if self._current:
            state = self._pulled(state)
            self._known_others = self._others(state)
            timer.lap("exchange")
        timer.end(step + 1, logs, trained=self.served.trained + step + 1, examples=data.examples)
        if self.recorded is None:
            self.job.joiners.admit(self._for_joiners)
        else:
            self.job.joiners.admit_none("a replay has the processes of its run")
        return logs, state

    def _for_joiners(self, whole: bool) -> Contents:
        """Return the state for workers that join, or only the position.

        Of the weights, those at the end of the last epoch do: at the end of the call, all processes get the
        present ones, of tables the rows that the call has updated. The other variables, such as the states of
        random generators, are those at the beginning of the call, from which a worker computes any step.
        """
        weights = zip(self.model.trainable_variables, self._known.weights, strict=True)
        slots = zip(self.model.optimizer.variables, self._known.values, strict=True)
        others = zip(self.model.non_trainable_variables, self._first_others, strict=True)
        known = KnownApart(self._random, self.mesh.facts(), [*weights, *slots, *others])
        return self.served.take(whole, self._steps, known)

    def _compare_batches(self) -> None:
        """Check that workers have read the same batches as this process.

        Raises:
            DisagreementError: a worker has read another one.
        """
        assert self._dispatcher is not None
        for step in list(self._checks):
            if (found := self._dispatcher.take_check(step)) is None:
                continue
            worker, check = found
            if check != self._checks.pop(step):
                raise DisagreementError(
                    f"step {step + 1} of {self.call.name}: worker {worker} has read another batch than the "
                    "chief; give all processes the same data in the same order: seed generators and "
                    "shuffles, and pass a fresh iterator to each fit"
                )

    def _refuse_another_rate(self, state: Any) -> None:
        """Raise ModelError if a callback has changed the learning rate within an epoch."""
        rate = given_rate(self.model.optimizer)
        if not isinstance(rate, keras.Variable):
            return
        if self._rate is None:
            self._rate = next(i for i, one in enumerate(self.model.optimizer.variables) if one is rate)
        index = self._rate
        now = self.backend.to_numpy(rate.value if state is None else state[2][index])
        if now.tobytes() != self._known.values[index].tobytes():
            raise ModelError(
                "a callback changes the learning rate within an epoch, which parameter servers do not "
                "support: use a keras.optimizers.schedules.LearningRateSchedule, or change it at the "
                "beginning or end of epochs"
            )

    def _values(self, state: Any) -> tuple[list[Array], list[Array]]:
        """Return the weights and the optimizer's variables."""
        groups: Sequence[Any] = self.model.trainable_variables, self.model.optimizer.variables
        if state is None:
            groups = tuple([variable.value for variable in group] for group in groups)
        else:
            groups = state[0], state[2]
        weights, slots = ([np.array(self.backend.to_numpy(value)) for value in group] for group in groups)
        return weights, slots

    def _others(self, state: Any) -> list[Array]:
        """Return the non-trainable variables."""
        values = state[1] if state is not None else [v.value for v in self.model.non_trainable_variables]
        return [np.array(self.backend.to_numpy(value)) for value in values]

    def _pulled(self, state: Any) -> Any:
        """Return the state with what the servers and the dispatcher have, while no step is in work."""
        assert self._dispatcher is not None
        known = self._known
        known.read(self._servers, self._steps)
        if self.tables is not None:
            self._dispatcher.set_layers(self._digests())
            self.tables.closed = ""
        state = self._program.put(state, known.weights, self._dispatcher.layers)
        if state is not None:
            return *state[:2], [keras.ops.convert_to_tensor(one) for one in known.values], *state[3:]
        for variable, value in zip(self.model.optimizer.variables, known.values, strict=True):
            variable.assign(value)
        return None

    def _digests(self) -> dict[str, Array]:
        """Return the digests of tables that only servers have, by the names of the layers' state."""
        weights = [id(one) for one in self.model.trainable_variables]
        others = [id(one) for one in self.model.non_trainable_variables]
        found = {}
        for layer in self._server_layers:
            digest = self._servers.digests[weights.index(id(embedding_table(layer)))]
            position = others.index(id(layer.digest_variable))
            name = self._program.layer_of(position) or f"{VARIABLE}/{position}"
            found[name] = digest.view(np.int32)
        return found

    def _write_changes(self, state: Any) -> None:
        """Give servers and workers what the program or its callbacks have changed since the last epoch."""
        assert self._dispatcher is not None
        others, metrics = self._others(state), {id(variable) for variable in self.model.metrics_variables}
        given = {}
        for i, (old, new) in enumerate(zip(self._known_others, others, strict=True)):
            if not same_bits(old, new) and id(self.model.non_trainable_variables[i]) not in metrics:
                given[self._program.layer_of(i) or f"{VARIABLE}/{i}"] = new
        if given:
            self._dispatcher.set_layers(given)
        self._known_others = others
        changed, slots = self._known.write_changes(self._servers, self._steps, *self._values(state))
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
        """Take the weights if the training stops here."""
        self._chief.end_batch()
