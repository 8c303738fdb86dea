"""The messages between the chief, the workers and the parameter servers of a job.

Workers and the chief ask questions. Parameter servers and the chief answer each question once, perhaps later.
Arrays travel beside the messages; see `lockstep.transport.array_channel`.
"""

import msgspec

Slot = tuple[int, int]
"""A variable of an optimizer: the position of the variable that it belongs to, or -1 minus the number of the
optimizer if it belongs to none, and its number among those of the same position."""


class Introduction(msgspec.Struct, frozen=True, tag="hello"):
    """The process that asks: the first message of a connection, and the beginning and the end of each call.

    It has no answer.

    Attributes:
        process: the id of the task of the process that asks.
        server: the number of the parameter server whose shards the questions are about; -1 for the chief.
        worker: the worker id of the process.
        call: the number of the call in which it asks from now on; 0 outside of calls.
    """

    process: int
    server: int = -1
    worker: int = -1
    call: int = 0


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Does the process run? The answer is `Applied`, even while the process waits.

    As the first message of a connection, it is the only one.
    """


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """A worker asks a server for its shards, to compute a step; the answer is `ServedValues`.

    Attributes:
        step: the number of the step.
        common: whether it also asks for the variables of the optimizers that do not belong to a weight.
        part: the number of times that the step has already applied an optimizer.
        tables: the positions of the shards from which it requests rows, whose numbers are in the arrays.
    """

    step: int
    common: bool = False
    part: int = 0
    tables: tuple[int, ...] = ()


class PullRows(msgspec.Struct, frozen=True, tag="pull rows"):
    """A worker asks a server for rows that a scheduled function looks up; the answer is `ServedValues`.

    The numbers of the rows in the shard are in the arrays.

    Attributes:
        step: the number of the function.
        shard: the position of the shard.
        lookup: the number of the lookup in the function.
    """

    step: int
    shard: int
    lookup: int


class Push(msgspec.Struct, frozen=True, tag="push"):
    """A worker gives a server the gradients of its shards; the answer is `Applied`.

    Attributes:
        step: the step for which they were computed.
        shards: the positions of the server's shards that have a gradient, in the order of the arrays.
        updates: the numbers of the optimizers that are applied.
        part: the number of times that the step has already applied an optimizer.
        tables: the positions of the shards in which only some rows have a gradient. The numbers of these rows
            follow in the arrays.
    """

    step: int
    shards: tuple[int, ...]
    updates: tuple[int, ...] = (0,)
    part: int = 0
    tables: tuple[int, ...] = ()


class Read(msgspec.Struct, frozen=True, tag="read"):
    """The chief asks a server for its shards and its optimizer's variables; the answer is `ServedValues`.

    Of tables, the answer has the rows that were updated since the last question.

    Attributes:
        step: the number of steps that were completed.
    """

    step: int


class Write(msgspec.Struct, frozen=True, tag="write"):
    """The chief replaces values that a callback has changed; the answer is `Applied`.

    Attributes:
        step: the number of steps that were completed.
        shards: the positions of the shards of the first arrays.
        slots: the variables of the optimizer of the other arrays; see `ServedValues`.
    """

    step: int
    shards: tuple[int, ...]
    slots: tuple[Slot, ...]


class ReadRows(msgspec.Struct, frozen=True, tag="read_rows"):
    """A process asks a server for rows of a table that only servers have; the answer is `ServedValues`.

    The numbers of the rows, in the whole table, are in the arrays. The answer has these rows, and names all
    slots of the table.

    Attributes:
        table: its number.
        slot: the number of a slot of the optimizer to read instead of the rows; -1 for the rows.
        loads: the number of times that the process has loaded rows of the table, outside of `fit`.
        in_turn: whether the server answers in turn with the other questions of the call, which may change its
            shards. Otherwise a thread answers at any time.
    """

    table: int
    slot: int = -1
    loads: int = 0
    in_turn: bool = False


class WriteRows(msgspec.Struct, frozen=True, tag="write_rows"):
    """The chief replaces rows of a table that only servers have; the answer is `Applied`.

    The numbers of the rows, and the rows, are in the arrays.

    Attributes:
        table: its number.
        slot: as in `ReadRows`.
    """

    table: int
    slot: int = -1


class CopyRows(msgspec.Struct, frozen=True, tag="copy_rows"):
    """The new standby of a server asks for rows that only servers have; the answer is `CopiedRows`.

    The numbers of the rows, in the whole table, are in the arrays.

    Attributes:
        table: its number.
        loads: as in `ReadRows`.
    """

    table: int
    loads: int


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """A server has another one keep a message that it processes; the answer is `Applied`.

    The staleness of the answer is -1 if the other server has taken over the shards.

    Attributes:
        process: the process that sent the message.
        question: the message. Its arrays are beside this one, except for a `Pull` or `PullRows`.
    """

    process: int
    question: Pull | PullRows | Push | Read | Write | WriteRows


class KeepState(msgspec.Struct, frozen=True, tag="keep state"):
    """A server gives another one its state, in the arrays; the answer is as for `Keep`.

    The state includes all messages that were kept before, which are no longer needed.
    """


class EndCall(msgspec.Struct, frozen=True, tag="stop"):
    """The chief ends the call on a server; the answer is `Applied`."""


class AtCall(msgspec.Struct, frozen=True, tag="call"):
    """A process waits for the chief at a call, or for work between calls.

    The chief answers `Passed` when it has made the call itself, or gives a worker a unit of work with
    `Assigned`. In `fit`, a call is the beginning, or the end of an epoch; the units of work are its steps.

    Attributes:
        call: the number of the call, from 0; -1 for a worker that visits batches, and waits for a step.
        scheduled: the number of units of work that the process can do now, including earlier ones; -1 for
            any. In `fit`, a worker gives back the steps that it has not begun.
    """

    call: int
    scheduled: int


class FunctionFailure(msgspec.Struct, frozen=True):
    """A scheduled function has raised an exception.

    Attributes:
        module: the module of the class of the exception.
        name: the name of the class, qualified.
        message: the message of the exception.
        arguments: the arguments of the exception, as the JSON-able part of `lockstep.checkpoint.values.pack`,
            encoded; empty if they are not plain.
        step: the number of the function.
        worker: the worker that has run it.
    """

    module: str
    name: str
    message: str
    arguments: bytes
    step: int
    worker: int


class WorkDone(msgspec.Struct, frozen=True, tag="returned"):
    """A worker has done a unit of work, and all servers have its gradients. The answer is as for `AtCall`.

    Attributes:
        at: where the worker waits now.
        step: the number of the unit.
        changed: the names of the variables that a function changes. The arrays begin with their values before
            the function, and those after it.
        names: for a step, the names of the next arrays: changes of the layers' state, metrics, logged values.
        staleness: the largest number, on any server, of changes of the weights between reading and changing
            them.
        check: a hash that identifies the batch of a step.
        result: the result of a function, whose arrays are the last ones; None if the function has failed.
        failure: why the function has failed.
    """

    at: AtCall
    step: int
    changed: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    staleness: int = 0
    check: bytes = b""
    result: "FunctionResult | None" = None
    failure: FunctionFailure | None = None


class FunctionResult(msgspec.Struct, frozen=True):
    """The result of a function.

    Attributes:
        packed: the JSON-able part of `lockstep.checkpoint.values.pack`, encoded.
        names: the names of its arrays.
    """

    packed: bytes
    names: tuple[str, ...]


class ServedValues(msgspec.Struct, frozen=True, tag="values"):
    """The arrays have the server's shards, and then the variables of its optimizer, if requested.

    Attributes:
        slots: the variables of optimizers in the arrays, with the positions of the server's shards.
        tables: the positions of the shards that have only some of their rows, with their slots. The numbers
            of these rows follow in the arrays.
        digests: the positions of the shards that only servers have; the array of such a shard is the digest
            of its rows and of their slots, which are not in `slots`.
    """

    slots: tuple[Slot, ...] = ()
    tables: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()


class CopiedRows(msgspec.Struct, frozen=True, tag="copied_rows"):
    """Rows of a table, and all their slots, in the arrays.

    Attributes:
        slots: for each array after the first one, the number of the optimizer and of the slot. The optimizer
            -1 is the one that last trained the rows, or whose slots were loaded.
        optimizer: the number of the optimizer that last trained the rows; -1 if there is none.
        loaded: whether rows have been loaded since then.
    """

    slots: tuple[tuple[int, int], ...]
    optimizer: int
    loaded: bool


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """A server has processed a message.

    Attributes:
        staleness: the staleness of a push; -1 if it was not applied, because another worker has computed the
            step.
    """

    staleness: int = 0


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """A unit of work for a worker: a step of `fit`, or a scheduled function.

    The arrays are the layers' state, or the variables that functions have changed.

    Attributes:
        step: the number of the unit, from 0.
        incomplete: the earlier units that are not complete; the worker keeps their data.
        names: the names of the arrays.
        replacement: the worker id of the process that replaces a lost worker and does this unit; in a replay,
            the id in the recorded run. -1 if the worker is not a replacement.
    """

    step: int
    incomplete: tuple[int, ...]
    names: tuple[str, ...]
    replacement: int = -1


class Passed(msgspec.Struct, frozen=True, tag="passed"):
    """The chief has made a call; see `AtCall`.

    Attributes:
        until: the chief has also made all calls before this number, which had no result. At the beginning of
            `fit`, it has opened the epoch with the previous number.
        kind: the name of the call on the chief; "close" if there is no more work.
        state: whether the arrays begin with the weights, the variables of the optimizers, and other
            variables.
        variables: the positions of the other variables.
        done: the result of `done`.
        results: the results of `fetch`, or of all functions at the end; their arrays follow those of the
            variables.
        steps: the numbers of these functions, at the end.
        failures: why other functions have no result, by their numbers, at the end.
        failure: the error that the call raises.
        completed: at the beginning of `fit`, all steps before this one are complete.
    """

    until: int
    kind: str = "schedule"
    state: bool = False
    variables: tuple[int, ...] = ()
    done: bool = False
    results: tuple[FunctionResult, ...] = ()
    steps: tuple[int, ...] = ()
    failures: tuple[tuple[int, FunctionFailure], ...] = ()
    failure: FunctionFailure | None = None
    completed: int = 0


Question = (
    Introduction
    | Alive
    | Pull
    | PullRows
    | Push
    | Read
    | Write
    | Keep
    | KeepState
    | EndCall
    | AtCall
    | WorkDone
    | ReadRows
    | WriteRows
    | CopyRows
)
Answer = ServedValues | CopiedRows | Applied | Assigned | Passed
