"""Runs a scheduled function in this process: its changes are measured and undone.

The gradients that the function applies are kept for the servers instead. Other variables that it assigns get
their earlier values back, and the chief combines the values from before and after the run with its own.

**A trial first.** Before the first gradient, the servers need the variables that a function trains. Analyzing
its code cannot show them, so all processes run it once (`FunctionRunner.try_out`), with equal variables and
with random numbers that do not count, and undo it. The trial shows, and a `_Profile` keeps:

* the optimizers that the function applies, and to which variables;
* the other variables that it assigns, whose values before and after each run are sent to the chief;
* whether it applies an optimizer more than once, or reads a weight after its update. Keeping the gradients
  until the end would then give different results. Such a function *exchanges* gradients for new weights at
  each update, while it runs;
* everything that parameter servers do not support, as a ModelError.

A trial may raise an exception, for example because a dataset is empty. It is ignored: the function raises it
again when a worker runs it. But the profile is then incomplete, and the next `schedule` tries the function
again.

**TensorFlow's graphs.** While TensorFlow traces a `tf.function`, Python runs once, with symbolic tensors. So
there are two trials. The first one runs the function eagerly, and shows the reads and updates in the order in
which they happen. The second one traces the graph, which contains all branches. In a graph, gradients are
assigned to variables (`OptimizerGradients`), and an exchange is an operation that calls Python. Graphs
outlive one run, so they must not refer to objects of a run: they ask the runner for the exchange and the
lookups of the function that runs now.

TensorFlow may trace a function twice, and a read before the update in the second trace must not count as a
read of an updated weight. So `_Watcher._updated` has the graphs in which each weight was updated, and a read
counts only if it happens in one of these graphs, or if both happen outside of all graphs. A read outside of a
graph after an update in one is seen in the eager trial. Tests show that the two trials together detect every
such read, but this is not proven. A function with an undetected one would compute with weights from before
its update.

**How variables are identified.** A function is identified by its code, the object whose method it is, and the
functions and Keras objects that it closes over (`_key`): programs define functions in loops, and schedule
equal ones again and again. A variable of the program is identified by its position among the variables that
were created in the scope of the strategy, which is equal in all processes (`ScopeVariables`). So a variable
from outside of the scope is refused.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import InputError, LockstepError, ModelError
from lockstep.keras.assignments import is_observed_by, observed_by, reads_observed_by
from lockstep.keras.backends.eager_contract import EagerBackend
from lockstep.keras.backends.multi_update import Update, UpdateCall
from lockstep.keras.parameter_server.served_optimizers import (
    iterations_of,
    lazy_hindrance,
    place_weights,
    refuse_optimizer,
    slots_of,
    transfers_of,
)
from lockstep.keras.parameter_server.server_tables import (
    NO_ROWS_ON_JAX,
    ServerTable,
    look_up_for,
    looking_up_for,
    running_function,
    server_table,
)
from lockstep.keras.parameter_server.table_rows import positions_of, summed_by_row
from lockstep.keras.private.common import (
    KERAS_SEED,
    global_generator,
    stored_value,
    trained_by,
    variables_without_decay,
)
from lockstep.keras.randomness import random_numbers, random_states, set_random_states
from lockstep.keras.replica_run.merges import Op, Replica, computing_as
from lockstep.keras.seeds import key_of_replica
from lockstep.parameter_server.partitioners import Partitioner

Array = npt.NDArray[Any]
Result = TypeVar("Result")
Exchange = Callable[[int, Mapping[int, Array]], list[Array]]
"""Gives the servers the gradients of an optimizer, by its number and the positions of its variables; returns
the values of `FunctionRunner.pulled` after the update."""


class ScopeVariables:
    """The variables that the program creates in the scope of a strategy, in their order: equal in all
    processes.

    A `lockstep.keras.assignments.VariableObserver`.
    """

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self._positions: dict[int, int] = {}

    def on_create(self, variable: Any) -> None:
        """Add a variable."""
        if id(variable) not in self._positions:
            self._positions[id(variable)] = len(self.variables)
            self.variables.append(variable)

    def on_assign(self, variable: Any) -> None:
        """Do nothing."""

    def position(self, variable: Any) -> int | None:
        """Return the position of a variable, or None if it was created elsewhere."""
        return self._positions.get(id(variable))


@dataclass
class RanFunction:
    """The results of a function.

    Attributes:
        result: its result, with arrays of NumPy instead of tensors.
        gradients: the gradients by the number of the variable over all optimizers.
        rows: the rows to which the gradients of tables belong, by the same numbers.
        updates: the numbers of the optimizers that it has applied.
        changes: the values of other variables before and after it, by their positions in the scope.
    """

    result: Any = None
    gradients: dict[int, Array] = field(default_factory=dict)
    rows: dict[int, Array] = field(default_factory=dict)
    updates: tuple[int, ...] = ()
    changes: dict[int, tuple[Array, Array]] = field(default_factory=dict)


@dataclass
class _Profile:
    """The properties of a function that its trial runs have shown.

    Attributes:
        function: the function.
        complete: whether a trial run has reached its end.
        exchanges: whether it exchanges gradients for new weights at each update, because it makes several
            updates, or uses the new weights.
        assigned: the positions of the variables that it assigns.
        updates: the numbers of the optimizers that it applies.
        draws: the numbers that its random operations on TensorFlow draw.
        raised: the exception of its last trial run that did not reach its end.
    """

    function: Any
    complete: bool = False
    exchanges: bool = False
    assigned: set[int] = field(default_factory=set)
    updates: set[int] = field(default_factory=set)
    draws: Any = None
    raised: str = ""


class FunctionRunner:
    """Runs scheduled functions.

    Args:
        scope: the variables that functions may change.
        backend: the backend on which they run.
        partitioner: divides variables among servers.
        max_staleness: see `ServerOptions`.

    Attributes:
        updates: the optimizers that functions have applied in trial runs, with their variables.
        pulled: the variables that a function reads from the servers: those that optimizers update, except
            tables that only servers have, and the optimizers' variables that belong to no weight. Set only
            in processes that run functions.
        met: the tables whose servers have begun; None before that.
        failure: the error of a lookup in the function that runs now.
        pull_rows: reads rows of such a table, by the number of its variable over all optimizers, for the
            function that runs now.
        exchange: the exchange of the function that runs now.
        only_on_servers: the ids of the optimizers' variables that belong to a weight, such as momentum.
        transfers: reads and assigns variables.
    """

    def __init__(
        self,
        scope: ScopeVariables,
        backend: EagerBackend,
        partitioner: Partitioner | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self.updates: list[Update] = []
        self.only_on_servers: set[int] = set()
        self.pulled: list[Any] = []
        self.exchange: Exchange | None = None
        self.met: frozenset[ServerTable] | None = None
        self.failure: LockstepError | None = None
        self.pull_rows: Callable[[int, Array], Array] | None = None
        self._scope, self._backend, self._partitioner = scope, backend, partitioner
        self._max_staleness = max_staleness
        self._profiles: dict[Any, _Profile] = {}
        self._on_tensorflow = keras.backend.backend() == "tensorflow"
        self._graph_gradients: dict[int, Any] = {}
        self._iterations: list[int] = []
        self._generator: Any = None
        self.transfers = transfers_of(backend)

    def is_new(self, function: Callable[..., Any]) -> bool:
        """Whether no trial run of a function has reached its end."""
        profile = self._profiles.get(_key(function))
        return profile is None or not profile.complete

    def exchanges(self, function: Callable[..., Any]) -> bool:
        """Whether a function that was tried out exchanges gradients for new weights."""
        return self._profiles[_key(function)].exchanges

    @property
    def shared(self) -> list[Any]:
        """The variables of Keras that functions of all workers use."""
        variables = [*self.pulled, *self._scope.variables]
        if self._generator is not None:
            variables.append(self._generator.state)
        return list({id(variable): variable for variable in variables}.values())

    def keep_shared(self) -> Callable[[], None]:
        """Return a function that restores everything that runs share to its present state."""
        variables = self.shared
        values, states, in_graphs = self.transfers.read(variables), random_states(), list[Any]()
        running = running_function()
        graph_draws = [profile.draws for profile in self._profiles.values() if profile.draws is not None]
        numbers = [graph_draw.number for graph_draw in graph_draws]
        if self._on_tensorflow:
            from lockstep.keras import tf_random_ops

            in_graphs = tf_random_ops.state_of_graphs()

        def put_back() -> None:
            self.transfers.assign(variables, values)
            for variable, value in in_graphs:
                variable.assign(value)
            for graph_draw, number in zip(graph_draws, numbers, strict=True):
                graph_draw.number = number
            set_random_states(states)
            look_up_for(running)

        return put_back

    def shown_by(self, function: Callable[..., Any]) -> dict[str, str]:
        """Return the properties of a function that its trial runs have shown, to compare them."""
        profile = self._profiles[_key(function)]
        return {
            "variables that it assigns": str(sorted(profile.assigned)),
            "optimizers that it applies": str(sorted(profile.updates)),
            "it comes to its end": str(profile.complete),
            "it uses updated weights": str(profile.exchanges),
        }

    def try_out(self, function: Callable[..., Any], call: Callable[[], Any], seed: int) -> None:
        """Run a function for the first time, and undo it; note the optimizers that it applies.

        All processes do this with equal variables, so that they create equal ones. An error of the function
        is ignored, because it occurs again when a worker runs the function.

        Raises:
            ModelError: parameter servers do not support a change that the function makes.
        """
        # The profile keeps the function, so that no other function gets the same key.
        profile = self._profiles.setdefault(_key(function), _Profile(function))
        # The first run is eager: variables that a graph creates have no values yet when the optimizer needs
        # them. The second one is a graph, which contains all branches.
        ways, first_new = (True, False) if self._on_tensorflow else (False,), len(self.updates)
        only_on_servers = set(self.only_on_servers)
        try:
            for eagerly in ways:
                profile.complete = self._tried(profile, call, seed, eagerly=eagerly)
            if profile.exchanges:
                self._refuse_bound()
                self._refuse_tables(profile)
                # With an exchange, TensorFlow traces the function again, so it has other operations.
                profile.draws = None
            self._refuse_late(first_new)
        except ModelError:
            # The program may schedule other functions.
            del self._profiles[_key(function)]
            for number in range(first_new, len(self.updates)):
                self._graph_gradients.pop(number, None)
            del self.updates[first_new:], self._iterations[first_new:]
            self.only_on_servers = only_on_servers
            raise

    def _tried(self, profile: _Profile, call: Callable[[], Any], seed: int, *, eagerly: bool) -> bool:
        """Run a function and undo it, and return whether it has reached its end."""
        before = {
            id(variable): (variable, self._backend.saved_value(variable))
            for variable in self._state_variables()
        }
        watcher = _Watcher(self, profile)
        for kept in self._graph_gradients.values():
            kept.reset()
        try:
            with (
                watcher.with_stand_ins(),
                self._isolated(profile, seed),
                _running_eagerly(eagerly),
                watcher.watching(),
            ):
                call()
            self._refuse_updates(before)
            for position in sorted(profile.assigned):
                variable, start = before.get(id(self._scope.variables[position]), (None, None))
                if variable is not None and not self._has_bits(variable, start):
                    _refuse_integer(variable)
            for number in profile.updates & self._graph_gradients.keys():
                profile.exchanges |= self._graph_gradients[number].times() > 1
            return True
        except ModelError:
            raise
        except Exception as error:
            profile.raised = f"{type(error).__name__}: {error}"
            return False
        finally:
            with observed_by(None):
                for variable, value in before.values():
                    variable.assign(value)
                for variable, start in watcher.created:
                    variable.assign(start)

    def run(
        self,
        function: Callable[..., Any],
        call: Callable[[], Any],
        step: int,
        seed: int,
        exchange: Exchange | None = None,
    ) -> RanFunction:
        """Run a function.

        Args:
            function: the function that was tried out.
            call: calls the function.
            step: the number of the function. Keras's random generators draw different numbers for each.
            seed: determines all other random numbers.
            exchange: gives gradients to the servers while the function runs; None if no function needs it.

        Raises:
            Exception: the function raised it.
            ModelError: parameter servers do not support a change that the function makes.
        """
        profile = self._profiles[_key(function)]
        seeds = [variable for variable in self._scope.variables if KERAS_SEED in variable.name]
        assigned = sorted(profile.assigned)
        values = self.transfers.read([*seeds, *(self._scope.variables[i] for i in assigned)])
        keys = values[: len(seeds)]
        starts = dict(zip(assigned, values[len(seeds) :], strict=True))
        self.exchange, self.failure = exchange, None
        watcher = _Watcher(self, profile, starts, exchange if profile.exchanges else None)
        self.transfers.assign(seeds, [key_of_replica(key, step) for key in keys])
        for number in profile.updates & self._graph_gradients.keys():
            self._graph_gradients[number].reset()
        try:
            with watcher.with_stand_ins(), self._isolated(profile, seed), watcher.watching():
                result = plain(call(), self._backend)
            changes = self._collected(profile, watcher)
        finally:
            restored = [self._scope.variables[position] for position in watcher.starts]
            self.transfers.assign([*seeds, *restored], [*keys, *watcher.starts.values()])
        return RanFunction(result, watcher.gradients, watcher.rows, tuple(sorted(watcher.applied)), changes)

    def _collected(self, profile: _Profile, watcher: "_Watcher") -> dict[int, tuple[Array, Array]]:
        """Return the changes of variables, and pass the gradients in graphs to the watcher."""
        assigned = [self._scope.variables[position] for position in watcher.starts]
        numbers = sorted(profile.updates & self._graph_gradients.keys())
        in_graphs = [self._graph_gradients[number].state for number in numbers]
        values = self.transfers.read([*assigned, *(variable for state in in_graphs for variable in state)])
        changes = {}
        for (position, start), end in zip(watcher.starts.items(), values, strict=False):
            if end.tobytes() != start.tobytes():
                _refuse_integer(self._scope.variables[position])
                changes[position] = start, end
        values = values[len(assigned) :]
        for number, state in zip(numbers, in_graphs, strict=True):
            state_values, values = values[: len(state)], values[len(state) :]
            for gradients in self._graph_gradients[number].kept_in(state_values):
                watcher.keep(number, gradients)
        return changes

    def _has_bits(self, variable: Any, value: Any) -> bool:
        """Whether a variable has the bits of a saved value."""
        arrays = [np.asarray(self._backend.to_numpy(tensor)) for tensor in (variable.value, value)]
        return arrays[0].tobytes() == arrays[1].tobytes()

    def _refuse_updates(self, before: Mapping[int, tuple[Any, Any]]) -> None:
        """Raise ModelError if a trial run has updated weights anyway."""
        for update, iterations_added in zip(self.updates, self._iterations, strict=True):
            iterations = iterations_of(update.optimizer)
            saved = before.get(id(iterations))
            start = iterations_added if saved is None else int(self._backend.to_numpy(saved[1]))
            if start != int(self._backend.to_numpy(iterations.value)):
                raise ModelError(
                    "a scheduled function applies an optimizer in a graph that was traced before: pass the "
                    "tf.function itself, and call it only within scheduled functions"
                )

    def refusing_own_variables(self) -> AbstractContextManager[None]:
        """Within the block, refuse assignments of variables that are not Keras's."""
        if not self._on_tensorflow:
            return nullcontext()
        from lockstep.keras.parameter_server.tf_functions import refusing_own_variables

        return refusing_own_variables()

    def exchanged(self, number: int, gradients: Mapping[int, Array]) -> list[Array]:
        """Make the exchange of the running function. Graphs call this, because they outlive one run."""
        assert self.exchange is not None
        return self.exchange(number, gradients)

    def _refuse_bound(self) -> None:
        """Raise ModelError if the bound of staleness does not count several updates of a function."""
        if self._max_staleness:
            raise ModelError(
                f"max_staleness={self._max_staleness} is for functions that apply an optimizer once; this "
                "one does so several times, or uses the new weights: use max_staleness=0 or None"
            )

    def _refuse_tables(self, profile: _Profile) -> None:
        """Raise ModelError if a function that exchanges gradients trains a table that only servers have."""
        for number in profile.updates:
            for position in self.tables_of(number):
                table = server_table(self.updates[number].variables[position])
                assert table is not None
                raise ModelError(
                    f"a scheduled function that trains layer {table.name!r}, a ServerEmbedding, applies an "
                    "optimizer several times, or uses the new weights: apply it once, at the end"
                )

    def _refuse_late(self, first_new: int) -> None:
        """Raise ModelError for a table that was built after the servers have begun.

        Args:
            first_new: the number of optimizers that earlier functions have applied.
        """
        for update in self.updates[first_new:]:
            for variable in update.variables:
                table = server_table(variable)
                if table is not None and self.met is not None and table not in self.met:
                    raise ModelError(
                        f"layer {table.name!r}, a ServerEmbedding, was built after functions were scheduled: "
                        "build it first"
                    )

    @property
    def tables(self) -> list[Any]:
        """The variables of the scope that represent tables that only servers have."""
        return [variable for variable in self._scope.variables if server_table(variable) is not None]

    def tables_of(self, number: int) -> list[int]:
        """Return the positions of the tables that only servers have among the variables of an optimizer."""
        variables = self.updates[number].variables
        return [position for position, variable in enumerate(variables) if server_table(variable) is not None]

    def numbers_of_tables(self, number: int) -> frozenset[int]:
        """Return the numbers of these tables over all optimizers."""
        first = self.first_of(number)
        return frozenset(first + position for position in self.tables_of(number))

    def number_of_table(self, table: ServerTable, raised: str) -> int:
        """Return the number of the variable of a table over all optimizers.

        Args:
            table: the table that a function looks up.
            raised: the exception of the function's last trial run; empty if it reached its end.

        Raises:
            ModelError: no function trains the table.
        """
        variables = [variable for update in self.updates for variable in update.variables]
        for number, variable in enumerate(variables):
            if server_table(variable) is table:
                return number
        if raised:
            raise ModelError(
                f"a scheduled function looks up rows of layer {table.name!r}, a ServerEmbedding, which none "
                f"trains yet: a trial of this function, in which all rows are zeros, raised {raised}"
            )
        raise ModelError(
            f"a scheduled function looks up rows of layer {table.name!r}, a ServerEmbedding, which none "
            "trains: first schedule one that trains it, or use evaluate"
        )

    def first_of(self, number: int) -> int:
        """Return the number of the first variable of an optimizer over all optimizers."""
        return sum(len(update.variables) for update in self.updates[:number])

    def number_of(self, optimizer: Any) -> int | None:
        """Return the number of an optimizer, or None if it has not been applied in a trial run."""
        numbers = (i for i, update in enumerate(self.updates) if update.optimizer is optimizer)
        return next(numbers, None)

    def add(self, optimizer: Any, variables: Sequence[Any]) -> int:
        """Add an optimizer that a trial run applies, and return its number.

        Raises:
            ModelError: parameter servers do not support it.
        """
        for variable in variables:
            self.refuse_outsider(variable, "is trained by")
        return outside_of_graphs(lambda: self._add(optimizer, variables))

    def _add(self, optimizer: Any, variables: Sequence[Any]) -> int:
        if not optimizer.built:
            optimizer.build(list(variables))
        update = Update(optimizer, list(trained_by(optimizer)))
        trained = {id(variable) for earlier in self.updates for variable in earlier.variables}
        twice = next((variable for variable in update.variables if id(variable) in trained), None)
        if twice is not None:
            raise ModelError(
                f"scheduled functions apply two optimizers to {twice.path!r}, which parameter servers do not "
                "support"
            )
        tables = [table for variable in update.variables if (table := server_table(variable)) is not None]
        if tables and keras.backend.backend() == "jax":
            raise ModelError(
                f"a scheduled function trains layer {tables[0].name!r}, a ServerEmbedding, {NO_ROWS_ON_JAX}"
            )
        if tables and (hindrance := lazy_hindrance(optimizer, update.variables)):
            raise ModelError(
                f"layer {tables[0].name!r} is a ServerEmbedding, whose rows are updated independently, but "
                f"{hindrance}; use keras.layers.Embedding"
            )
        servers = max((len(table.ranges) for table in tables), default=1)
        refuse_optimizer(update, place_weights([update], servers, self._partitioner))
        if variables_without_decay(optimizer):
            raise ModelError(
                "parameter servers do not support exclude_from_weight_decay with a list of variables: pass "
                "var_names"
            )
        self.updates.append(update)
        self._iterations.append(int(self._backend.to_numpy(iterations_of(optimizer).value)))
        slots = zip(slots_of(optimizer, update.variables), optimizer.variables, strict=True)
        self.only_on_servers |= {id(variable) for slot, variable in slots if slot[0] >= 0}
        return len(self.updates) - 1

    def refuse_outsider(self, variable: Any, verb: str) -> int:
        """Return the position of a variable in the scope; refuse a variable from outside.

        Raises:
            ModelError: it was created outside of the scope.
        """
        if (position := self._scope.position(variable)) is None:
            raise ModelError(
                f"{variable.path!r} {verb} a scheduled function and was created outside of the scope of its "
                "ParameterServerStrategy: create models, optimizers and metrics in `with strategy.scope():`"
            )
        return position

    @property
    def served(self) -> list[Any]:
        """The variables that are on the servers: those that optimizers update, then the optimizers' own."""
        trained = [variable for update in self.updates for variable in update.variables]
        return [*trained, *(variable for update in self.updates for variable in update.optimizer.variables)]

    def others(self) -> dict[int, Any]:
        """Return the variables of the scope that are not on the servers, by position."""
        served = {id(variable) for variable in self.served}
        return {i: variable for i, variable in enumerate(self._scope.variables) if id(variable) not in served}

    def graph_gradients(self, number: int) -> Any:
        """Return the gradients of an optimizer in graphs of TensorFlow."""
        from lockstep.keras.parameter_server.tf_functions import OptimizerGradients

        if number not in self._graph_gradients:
            self._graph_gradients[number] = outside_of_graphs(
                lambda: OptimizerGradients(self.updates[number].variables, self.tables_of(number))
            )
        return self._graph_gradients[number]

    def _state_variables(self) -> list[Any]:
        return [
            *self._scope.variables,
            *(variable for update in self.updates for variable in update.optimizer.variables),
        ]

    @contextmanager
    def _isolated(self, profile: _Profile, seed: int) -> Iterator[None]:
        if not self._on_tensorflow:
            with self._backend.isolated(seed):
                yield
            return
        from lockstep.keras import tf_random_ops

        self._generator = self._generator or keras.random.SeedGenerator(0, name="replica")
        self.transfers.assign([self._generator.state], [np.array([seed % 10**9, 0], "uint32")])
        with random_numbers(seed, self._generator):
            profile.draws = profile.draws or tf_random_ops.GraphDraws()
            profile.draws.restart()
            tf_random_ops.begin_all(seed)
            with tf_random_ops.drawn_from(profile.draws):
                yield


class _Watcher:
    """Watches one run of a function: a `VariableObserver`, and the `Merger` of its only replica.

    Args:
        runner: the runner that runs the function.
        profile: the profile of the function.
        starts: the values of variables that it assigns, by position; None in a trial run.
        exchange: gives gradients to the servers immediately; None to keep them until the function has run.

    Attributes:
        gradients: the gradients that were applied, by the number of the variable over all optimizers.
        rows: the rows to which the gradients of tables belong, by the same numbers.
        applied: the numbers of the optimizers that were applied.
        created: variables that a trial run has created, with their first values.
        starts: the values, before the run, of all variables that it assigns.
    """

    def __init__(
        self,
        runner: FunctionRunner,
        profile: _Profile,
        starts: dict[int, Array] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._exchange = exchange
        self.gradients: dict[int, Array] = {}
        self.rows: dict[int, Array] = {}
        self.applied: set[int] = set()
        self.created: list[tuple[Any, Any]] = []
        self.starts = starts or {}
        self._runner, self._profile, self._tries = runner, profile, starts is None
        self._on_torch = keras.backend.backend() == "torch"
        self._new: dict[int, Any] = {}
        self._in_graphs: set[int] = set()
        self._valued: set[int] = set()
        self._served = {id(variable) for variable in runner.served}
        self._updated: dict[int, list[Any]] = {}
        self._stand_ins: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, this thread runs the function."""
        with observed_by(self), computing_as(Replica(0, self)), ExitStack() as stack:
            if self._tries:
                stack.enter_context(reads_observed_by(self.on_read))
                stack.enter_context(self._runner.refusing_own_variables())
            stack.enter_context(looking_up_for(self))
            yield

    @contextmanager
    def with_stand_ins(self) -> Iterator[None]:
        """Within the block, on PyTorch, variables that represent tables have gradients like the tables."""
        if not self._on_torch:
            yield
            return
        from lockstep.keras.parameter_server.torch_functions import StandIns

        self._stand_ins = StandIns()
        try:
            for variable in self._runner.tables:
                self._stand_in(variable)
            yield
        finally:
            self._stand_ins.end()

    def _stand_in(self, variable: Any) -> None:
        """On PyTorch, let the parameter of a table have gradients like the table."""
        table = server_table(variable)
        assert table is not None
        self._stand_ins.add(stored_value(variable), table.name, (table.rows, table.width))

    def on_read(self, variable: Any) -> None:
        """Note that the function reads a variable, which it may have updated before.

        Raises:
            ModelError: the function reads values that only the servers have.
        """
        if not is_observed_by(self):
            return
        if id(variable) in self._runner.only_on_servers:
            raise ModelError(
                f"a scheduled function reads {variable.path!r}, a variable of an optimizer that only the "
                "servers have: read it in the script, after join"
            )
        table = server_table(variable)
        if table is not None and self._on_torch:
            # The program needs the variable to read its gradient. The parameter itself refuses other reads.
            return
        if table is not None:
            on_jax = keras.backend.backend() == "jax"
            why = "other than by lookups, such as in a loss: use keras.layers.Embedding"
            raise ModelError(
                f"a scheduled function reads the table of layer {table.name!r}, a ServerEmbedding, "
                f"{NO_ROWS_ON_JAX if on_jax else why}"
            )
        self._note_read(variable)

    def note_lookup(self, variable: Any) -> None:
        """Note that the function looks up rows."""
        if self._on_torch:
            # The function may have built the layer.
            self._stand_in(variable)
        self._note_read(variable)

    def look_up(self, table: ServerTable, ids: Array) -> Array:
        """Return the rows of ids, or zeros in a trial run, while no server answers."""
        if self._tries or not ids.size:
            return np.zeros((*ids.shape, table.width), table.dtype)
        pull = self._runner.pull_rows
        assert pull is not None
        try:
            raised = "" if self._profile.complete else self._profile.raised
            number = self._runner.number_of_table(table, raised)
            return table.arranged(ids, functools.partial(pull, number))
        except LockstepError as error:
            self._runner.failure = error
            raise

    def _note_read(self, variable: Any) -> None:
        updated_in = self._updated.get(id(variable))
        if updated_in is None:
            return
        graphs = entered_graphs()
        # TensorFlow may trace a function twice, and then reads the variable again before the update. It also
        # reads the variables that a graph captures before it runs the graph. Neither counts.
        if (not graphs and not updated_in) or any(
            graph is updated_graph for graph in graphs for updated_graph in updated_in
        ):
            self._profile.exchanges = True

    def on_create(self, variable: Any) -> None:
        """Note a variable that the function creates."""
        self._new[id(variable)] = variable
        if entered_graphs():
            self._in_graphs.add(id(variable))
        if self._tries:
            self._runner._scope.on_create(variable)

    def on_assign(self, variable: Any) -> None:
        """Note that the function assigns a variable."""
        key = id(variable)
        if key in self._new:
            if self._tries and key in self._in_graphs:
                raise ModelError(
                    f"{variable.path!r} is created and assigned in a tf.function: create the layer or metric "
                    "in `with strategy.scope():`, and call it once before scheduling a function that uses it"
                )
            if self._tries and key not in self._valued and stored_value(variable) is not None:
                self._valued.add(key)
                self.created.append((variable, self._now(variable)))
            return
        if key in self._served or variable.trainable:
            raise ModelError(
                f"a scheduled function assigns the weight {variable.path!r} itself; weights change through "
                "an optimizer's apply"
            )
        generator = global_generator()
        if generator is not None and variable is generator.state:
            # Its state follows from the number of the function. It is not a variable of the program.
            return
        position = self._runner.refuse_outsider(variable, "is assigned by")
        if KERAS_SEED in variable.name:
            return
        self._profile.assigned.add(position)
        if not self._tries and position not in self.starts:
            self.starts[position] = self._now(variable)

    def apply(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any] | None,
        call: UpdateCall | None = None,
    ) -> None:
        """Keep gradients instead of applying them. The servers call the optimizer's `apply`.

        Raises:
            ModelError: parameter servers do not support the optimizer, or the variables that it updates.
        """
        if not gradients:
            return
        if call is not None and call.name == "apply" and call.others:
            raise ModelError(
                f"a scheduled function passes custom arguments to apply of {type(optimizer).__name__}, "
                "which the servers call without them"
            )
        if call is not None and call.name == "apply_gradients":
            # It ends with `apply`.
            call(gradients, trained_by(optimizer) if variables is None else variables)
            return
        number = self._runner.number_of(optimizer)
        if number is None:
            if not self._tries:
                raise ModelError(
                    f"a scheduled function applies {type(optimizer).__name__} only in some steps: apply it "
                    "when the function first runs, too"
                )
            number = self._runner.add(optimizer, trained_by(optimizer) if variables is None else variables)
            self._served = {id(variable) for variable in self._runner.served}
        self._profile.updates.add(number)
        all_variables = self._runner.updates[number].variables
        positions = {id(variable): i for i, variable in enumerate(all_variables)}
        applied = all_variables if variables is None else variables
        if any(id(variable) not in positions for variable in applied) or len(gradients) != len(applied):
            raise ModelError(
                f"a scheduled function applies {type(optimizer).__name__} to different variables from "
                "before: apply it to all of its variables when the function first runs"
            )
        kept = {positions[id(v)]: g for v, g in zip(applied, gradients, strict=True) if g is not None}
        tables = self._runner.tables_of(number)
        for position in tables:
            if (gradient := kept.get(position)) is not None:
                self._refuse_tensor(all_variables[position], gradient)
        if self._exchange is not None:
            self._exchanged(number, kept, self._exchange)
            return
        if entered_graphs():
            self._runner.graph_gradients(number).add(kept)
        else:
            self.keep(number, {i: self._in_numpy(variable, i in tables) for i, variable in kept.items()})
        if self._tries:
            self._updated |= {
                id(variable): entered_graphs() for variable in self._runner.updates[number].changed
            }

    def keep(self, number: int, gradients: Mapping[int, Array | tuple[Array, Array]]) -> None:
        """Keep the gradients of an optimizer, by the positions of its variables.

        The gradients of tables are pairs of the ids of lookups and their gradients.
        """
        if number in self.applied:
            if self._tries:
                self._profile.exchanges = True
                return
            raise ModelError(
                "a scheduled function applies an optimizer more often than when it first ran: apply it "
                "equally often in each run"
            )
        self.applied.add(number)
        first = self._runner.first_of(number)
        for position, gradient in gradients.items():
            if isinstance(gradient, tuple):
                table = server_table(self._runner.updates[number].variables[position])
                assert table is not None
                ids, occurrences = gradient
                rows, inverse = np.unique(positions_of(table.name, table.rows, ids), return_inverse=True)
                self.rows[first + position] = rows
                gradient = summed_by_row(occurrences, inverse, len(rows))
            self.gradients[first + position] = np.array(gradient)

    def _in_numpy(self, gradient: Any, of_table: bool) -> Array | tuple[Array, Array]:
        if of_table and self._on_torch:
            from lockstep.keras.parameter_server.torch_functions import rows_of

            return rows_of(gradient)
        if of_table:
            return gradient.indices.numpy(), gradient.values.numpy()
        array: Array = self._runner._backend.to_numpy(gradient)
        return array

    def _refuse_tensor(self, variable: Any, gradient: Any) -> None:
        """Raise ModelError for a gradient of a table that is not a gradient of lookups."""
        table = server_table(variable)
        assert table is not None
        if self._on_torch:
            from lockstep.keras.parameter_server.torch_functions import is_of_rows

            right = is_of_rows(gradient, (table.rows, table.width))
            better = "the sparse tensor that is the grad of its variable's value, or a multiple of it"
        else:
            import tensorflow as tf

            right = isinstance(gradient, tf.IndexedSlices)
            better = "the tf.IndexedSlices of the tape, or what tf.clip_by_global_norm returns"
        if not right:
            raise ModelError(
                f"a scheduled function applies a tensor as the gradient of layer {table.name!r}, a "
                f"ServerEmbedding: apply {better}"
            )

    def _exchanged(self, number: int, gradients: Mapping[int, Any], exchange: Exchange) -> None:
        """Give gradients to the servers, and assign the new weights."""
        runner = self._runner
        if entered_graphs():
            from lockstep.keras.parameter_server.tf_functions import exchanged_in_graph

            exchange_arrays = functools.partial(runner.exchanged, number)
            exchanged_in_graph(exchange_arrays, gradients, runner.pulled, runner.shared)
            return
        arrays = {i: np.array(runner._backend.to_numpy(gradient)) for i, gradient in gradients.items()}
        # In a replay in one process, other functions run meanwhile.
        with self._stand_ins.suspended() if self._on_torch else nullcontext():
            values = exchange(number, arrays)
        runner.transfers.assign(runner.pulled, values)

    def all_reduce(self, op: Op, value: Any) -> Any:
        """Return the value."""
        return value

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return the value."""
        return value

    def _now(self, variable: Any) -> Array:
        with _eagerly():
            return np.array(self._runner._backend.to_numpy(variable.value))


def _refuse_integer(variable: Any) -> None:
    """Raise ModelError if a function has changed an integer, whose changes do not add up."""
    if variable.aggregation != "sum" and not keras.backend.is_float_dtype(variable.dtype):
        raise ModelError(
            f"a scheduled function changes {variable.path!r}, an integer: create it with "
            'aggregation="sum", so that the changes of all workers add up'
        )


@contextmanager
def _eagerly() -> Iterator[None]:
    """Within the block, TensorFlow computes values even while it traces a graph."""
    with ExitStack() as stack:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            stack.enter_context(tf.init_scope())
        yield


def _running_eagerly(eagerly: bool) -> AbstractContextManager[None]:
    """Within the block, if `eagerly`, functions of TensorFlow run eagerly."""
    if not eagerly:
        return nullcontext()
    from lockstep.keras.backends.tf_graphs import functions_run_eagerly

    return functions_run_eagerly()


def outside_of_graphs(act: Callable[[], Result]) -> Result:
    """Return the result of `act`, which may create variables even while TensorFlow traces a graph.

    Another thread is not in a graph, and its variables are not observed.
    """
    if not entered_graphs():
        with computing_as(None), observed_by(None):
            return act()
    with ThreadPoolExecutor(1, "lockstep-outside") as thread:
        return thread.submit(act).result()


def entered_graphs() -> list[Any]:
    """Return the graphs of TensorFlow that are being traced: none if functions run eagerly."""
    if keras.backend.backend() != "tensorflow":
        return []
    import tensorflow as tf

    graphs, graph = [], None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and graph.building_function:
        graphs.append(graph)
        graph = graph.outer_graph
    return graphs


def _key(function: Any) -> Any:
    """Identify a function by its code, the object whose method it is, and the values it closes over.

    Of the values that it closes over, only functions and objects of Keras count. Other values are data, such
    as batches.
    """
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif (inner := getattr(function, "python_function", None)) is not None:
            function = inner
        else:
            break
    inner = getattr(function, "__func__", function)
    cells = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_full(cell)]
    within = tuple(
        _key(value) if callable(value) and hasattr(value, "__code__") and value is not inner else id(value)
        for value in cells
        if callable(value) or isinstance(value, keras.Variable | keras.optimizers.Optimizer)
    )
    return getattr(inner, "__code__", inner), id(getattr(function, "__self__", None)), within


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def plain(result: Any, backend: EagerBackend) -> Any:
    """Return a result with arrays of NumPy instead of tensors, and bytes instead of tensors of strings."""
    if isinstance(result, keras.Variable):
        result = result.value
    if isinstance(result, dict):
        return {key: plain(value, backend) for key, value in result.items()}
    if isinstance(result, list):
        return [plain(value, backend) for value in result]
    if isinstance(result, tuple):
        return tuple(plain(value, backend) for value in result)
    if keras.ops.is_tensor(result) or hasattr(result, "__array__"):
        array = np.array(backend.to_numpy(result))
        return array.tolist() if array.dtype == object else array
    if result is not None and not isinstance(result, bool | int | float | str | bytes):
        raise InputError(
            f"a scheduled function returns a {type(result).__name__}, which has no value to send: return "
            "tensors, numbers, strings, and lists, tuples and dicts of them"
        )
    return result
