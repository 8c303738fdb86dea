"""Which tables workers read rows of, and the rows of a batch in place of the tables, in this process."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.data.batch import GlobalBatch
from lockstep.errors import DataError, ModelError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.input.readings import whole_batch
from lockstep.keras.parameter_server.embedding_tables import LookedUpRows, find_tables
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.keras.patches import adapter
from lockstep.parameter_server.partitioners import FixedShardsPartitioner, Shard, place_variables

layers, ops = keras.layers, keras.ops
USERS, ITEMS = 40, 20
generator = np.random.default_rng(0)
X = {
    "users": generator.integers(0, USERS, (12,)).astype("int32"),
    "items": generator.integers(-2, ITEMS, (12, 3)).astype("int32"),
}
Y = generator.normal(size=(12, 1)).astype("float32")


class Tower(layers.Layer):
    """Looks up rows inside a custom layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense = layers.Embedding(USERS, 4, name="of_users"), layers.Dense(3)

    def call(self, users: Any) -> Any:
        return self.dense(self.table(users))


class Recommender(keras.Model):
    """Looks up rows twice in one table, and once in another."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.items = Tower(), layers.Embedding(ITEMS, 2, name="of_items")
        self.score = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        items, users = inputs["items"], inputs["users"]
        first = ops.mean(self.items(items), axis=1)
        return self.score(ops.concatenate([self.tower(users), first, self.items(users % 7)], axis=-1))


class Tied(Recommender):
    """Multiplies by a table that it also looks up rows in."""

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) + ops.mean(self.items.embeddings)


class Drawing(Recommender):
    """Looks up random rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        shift = keras.random.randint((1,), 0, 2, seed=self.seeds)
        return super().call({**inputs, "users": inputs["users"] * shift})


class OwnLoss(Recommender):
    """Computes its loss itself."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def functional(**options: Any) -> keras.Model:
    users, items = (
        layers.Input((), dtype="int32", name="users"),
        layers.Input((3,), dtype="int32", name="items"),
    )
    table = layers.Embedding(USERS, 4, name="of_users", **options)
    of_items = layers.Embedding(ITEMS, 2, mask_zero=True, name="of_items")(items)
    parts = [table(users), layers.GlobalAveragePooling1D()(of_items), table(users // 2)]
    outputs = layers.Dense(1)(layers.Dropout(0.5)(layers.Concatenate()(parts)))
    return keras.Model({"users": users, "items": items}, outputs)


def behind(layer: Any) -> keras.Model:
    """Return a model with a layer before a lookup."""
    users, items = (
        layers.Input((), dtype="int32", name="users"),
        layers.Input((3,), dtype="int32", name="items"),
    )
    outputs = layers.Dense(1)(layers.Flatten()(layers.Embedding(ITEMS, 2, name="of_items")(layer(items))))
    return keras.Model({"users": users, "items": items}, outputs)


class Shift(layers.Layer):
    """Shifts ids by a variable."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, ids: Any) -> Any:
        return ids + ops.cast(self.shift, "int32")


class Same(layers.Layer):
    """Returns its inputs."""

    def call(self, ids: Any) -> Any:
        return ids


def compiled(make: Callable[[], keras.Model], optimizer: Any = "sgd") -> keras.Model:
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizer, "mse")
    model(X)
    model.optimizer.build(model.trainable_variables)
    return model


def found(model: keras.Model, x: Any = X) -> tuple[dict[str, list[np.ndarray]], dict[str, str]]:
    tables, reasons = find_tables(model, lambda: x, adapter().steps().to_numpy)
    lookups = zip(tables.layers.values(), tables.lookups(x), strict=True)
    return {layer.path: calls for layer, calls in lookups}, reasons


@pytest.mark.parametrize("make", [functional, Recommender])
def test_the_ids_of_all_lookups_follow_from_the_inputs(make: Callable[[], keras.Model]) -> None:
    model = compiled(make)
    nodes = [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    calls, reasons = found(model)
    assert reasons == {}
    named = {path.rpartition("/")[2]: ids for path, ids in calls.items()}
    items, users = np.where(X["items"] < 0, X["items"] + ITEMS, X["items"]), X["users"]
    expected = {"of_users": [users], "of_items": [items, users % 7]}
    if make is functional:
        expected = {"of_users": [users, users // 2], "of_items": [items]}
    for name, ids in expected.items():
        for one, wanted in zip(named[name], ids, strict=True):
            np.testing.assert_array_equal(one, wanted)
    assert [len(layer._inbound_nodes) for layer in model._flatten_layers()] == nodes


class Shifted(Recommender):
    """Looks up rows at ids that a variable shifts, outside of any layer."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        return super().call({**inputs, "users": inputs["users"] + ops.cast(self.shift, "int32")})


class Mapped(Recommender):
    """Looks up rows at ids that a variable maps."""

    def build(self, shape: Any) -> None:
        self.map = self.add_weight(shape=(USERS,), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        return super().call({**inputs, "users": ops.take(self.map, inputs["users"])})


def text() -> keras.Model:
    """Return a model of texts of any length."""
    words = layers.Input((None,), dtype="int32")
    features = layers.GlobalAveragePooling1D()(layers.Embedding(ITEMS, 2)(words + 1))
    return keras.Model(words, layers.Dense(1)(features))


def test_a_model_is_traced_for_each_shape_also_within_a_step() -> None:
    model = text()
    model.compile("sgd", "mse")
    tables, _ = find_tables(model, lambda: None, adapter().steps().to_numpy)
    with LookedUpRows(tables, model) as looked_up:
        for length in (3, 2, 4):
            ids = generator.integers(0, ITEMS - 1, (5, length)).astype("int32")
            (rows,) = looked_up.look_up(lambda ids=ids: ids).values()
            np.testing.assert_array_equal(rows, np.unique(ids + 1))
        looked_up.make_room()
        model(ids)


def test_the_rows_keep_their_variable_when_they_take_the_place_of_a_table_again() -> None:
    model = text()
    model.compile("sgd", "mse")
    tables, _ = find_tables(model, lambda: None, adapter().steps().to_numpy)
    looked_up, ids = LookedUpRows(tables, model), generator.integers(0, ITEMS - 1, (5, 3)).astype("int32")
    before, found = list(model.trainable_variables), []
    for _ in range(2):
        with looked_up:
            looked_up.look_up(lambda: ids)
            found.append((looked_up.make_room(), list(model.trainable_variables)))
        assert all(one is other for one, other in zip(model.trainable_variables, before, strict=True))
    (first_room, first), (second_room, second) = found
    assert (first_room, second_room) == (True, False)
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert sum(one is not other for one, other in zip(first, before, strict=True)) == 1


@pytest.mark.parametrize("others", [{}, {"another": X["users"]}], ids=["all", "more"])
@pytest.mark.parametrize("as_dict", [True, False])
def test_named_inputs_find_those_of_a_functional_model(as_dict: bool, others: dict[str, np.ndarray]) -> None:
    """Inputs of one shape would take each other's place otherwise."""
    users, items = (layers.Input((), dtype="int32", name=name) for name in ("users", "items"))
    tables = layers.Embedding(USERS, 4, name="of_users"), layers.Embedding(ITEMS, 2, name="of_items")
    outputs = layers.Dense(1)(layers.Concatenate()([tables[0](users), tables[1](items)]))
    inputs = {"users": users, "items": items} if as_dict else [users, items]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    calls, reasons = found(model, {"items": X["users"] % ITEMS, "users": X["users"], **others})
    assert reasons == {}
    named = {path.rpartition("/")[2]: ids for path, (ids,) in calls.items()}
    np.testing.assert_array_equal(named["of_users"], X["users"])
    np.testing.assert_array_equal(named["of_items"], X["users"] % ITEMS)


def test_one_named_input_is_found() -> None:
    users = layers.Input((), dtype="int32", name="users")
    model = keras.Model(users, layers.Dense(1)(layers.Embedding(USERS, 2)(users)))
    model.compile("sgd", "mse")
    ((ids,),) = found(model, {"users": X["users"]})[0].values()
    np.testing.assert_array_equal(ids, X["users"])


def test_inputs_get_the_ranks_of_a_functional_model() -> None:
    users = layers.Input((1,), dtype="int32")
    model = keras.Model(users, layers.Dense(1)(layers.Flatten()(layers.Embedding(USERS, 2)(users))))
    model.compile("sgd", "mse")
    calls, reasons = found(model, X["users"])
    assert reasons == {}
    ((ids,),) = calls.values()
    np.testing.assert_array_equal(ids, X["users"][:, None])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="strings are tensors of TensorFlow")
def test_strings_are_looked_up() -> None:
    words = layers.Input((2,), dtype="string")
    ids = layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=1)(words)
    model = keras.Model(words, layers.Dense(1)(layers.Flatten()(layers.Embedding(3, 2)(ids))))
    model.compile("sgd", "mse")
    calls, reasons = found(model, np.array([["a", "b"], ["c", "a"]], dtype=object))
    assert reasons == {}
    assert [one.tolist() for one in next(iter(calls.values()))] == [[[1, 2], [0, 1]]]


def test_names_of_later_layers_do_not_change() -> None:
    model = compiled(Recommender)
    before = layers.Add().name
    found(model)
    number = int(before.rpartition("_")[2]) if "_" in before else 0
    assert layers.Add().name == f"add_{number + 1}"


class Positions(layers.Layer):
    """Adds an embedding of the positions of words, which do not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = (
            layers.Embedding(ITEMS, 2, name="words"),
            layers.Embedding(3, 2, name="places"),
        )

    def call(self, words: Any) -> Any:
        return self.words(words) + self.places(ops.arange(3))


def with_positions() -> keras.Model:
    items = layers.Input((3,), dtype="int32", name="items")
    return keras.Model(items, layers.Dense(1)(layers.Flatten()(Positions()(items))))


def test_other_tables_of_a_model_do_not_matter_for_a_table() -> None:
    model = with_positions()
    model.compile("sgd", "mse")
    calls, reasons = found(model, X["items"])
    assert [path.rpartition("/")[2] for path in calls] == ["words"]
    assert [path.rpartition("/")[2] for path in reasons] == ["places"]
    assert "its ids do not depend on the inputs" in str(reasons)


@pytest.mark.parametrize(
    ("make", "optimizer", "tables", "said"),
    [
        (Tied, "sgd", 1, "reads it in other ways than by lookups"),
        (Drawing, "sgd", 0, "draws random numbers"),
        (OwnLoss, "sgd", 0, "its own train_step or compute_loss"),
        (lambda: functional(embeddings_regularizer="l2"), "sgd", 1, "has a regularizer"),
        (lambda: functional(embeddings_constraint="non_neg"), "sgd", 1, "a constraint"),
        (lambda: behind(Shift()), "sgd", 0, "which has variables"),
        (lambda: behind(Same()), "sgd", 0, "which is not one of Keras"),
        (lambda: behind(keras.Sequential([Same()])), "sgd", 0, "which is not one of Keras"),
        (Shifted, "sgd", 0, "may be the value of a variable"),
        (Mapped, "sgd", 0, "depend on the variable"),
        (lambda: behind(layers.Lambda(lambda ids: ids)), "sgd", 0, "which has variables"),
        (functional, keras.optimizers.Adam(use_ema=True), 0, "use_ema"),
        (functional, keras.optimizers.Lamb(), 0, "Lamb may not update each row"),
        (functional, keras.optimizers.Nadam(), 0, "variables that belong to no weight"),
    ],
)
def test_why_workers_read_whole_tables(
    make: Callable[[], keras.Model], optimizer: Any, tables: int, said: str
) -> None:
    calls, reasons = found(compiled(make, optimizer))
    assert len(calls) == tables
    assert any(said in reason for reason in reasons.values()), reasons


def test_a_frozen_table_is_no_table() -> None:
    model = functional(trainable=False)
    model.compile("sgd", "mse")
    calls, reasons = found(model)
    assert list(calls) == ["of_items"]
    assert reasons == {}


@pytest.mark.parametrize(("wrong", "row"), [(ITEMS, ITEMS), (-ITEMS - 1, -ITEMS - 1)])
def test_an_id_outside_of_its_table_is_refused(wrong: int, row: int) -> None:
    tables, _ = find_tables(compiled(functional), lambda: X, adapter().steps().to_numpy)
    items = X["items"].copy()
    items[3, 1] = wrong
    with pytest.raises(
        DataError, match=f"layer 'of_items' looks up row {row}, but its table has {ITEMS} rows"
    ):
        tables.lookups({**X, "items": items})


def test_ids_that_are_floats_are_those_of_the_model() -> None:
    model = keras.Sequential([layers.Embedding(1 << 25, 1), layers.Flatten(), layers.Dense(1)])
    model.compile("sgd", "mse")
    ids = np.array([[(1 << 24) + 1.0]])
    model(ids)
    calls, _ = found(model, ids)
    # The model's precision is float32.
    assert [one.tolist() for one in next(iter(calls.values()))] == [[[1 << 24]]]


def gradients_of(model: keras.Model, state: Any, batch: GlobalBatch) -> dict[int, np.ndarray]:
    backend = adapter().steps()
    program: Any = backend.program(model, "train")
    partial = program.compute(state, batch.share(0, 5), ())
    arrays = program.parts(0, {name: backend.to_numpy(value) for name, value in partial.items()})
    return {
        int(name.partition("/")[2]): np.array(array)
        for name, array in arrays.items()
        if name.startswith("gradient/")
    }


def state_of(model: keras.Model) -> Any:
    if keras.backend.backend() != "jax":
        return None
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([variable.value for variable in group] for group in groups)


@pytest.mark.ci("functional")
@pytest.mark.parametrize("make", [functional, Recommender])
def test_the_gradients_of_rows_are_those_of_the_tables(make: Callable[[], keras.Model]) -> None:
    model, backend = compiled(make), adapter().steps()
    tables, _ = find_tables(model, lambda: X, backend.to_numpy)
    batch = whole_batch((X, Y), 1)
    expected = gradients_of(model, state_of(model), batch)
    weights = [np.array(backend.to_numpy(variable.value)) for variable in model.trainable_variables]
    before = [id(variable) for variable in model.trainable_variables]
    with LookedUpRows(tables, model) as looked_up:
        rows = looked_up.look_up(lambda: X)
        assert rows.keys() == tables.variables
        assert looked_up.make_room()
        assert not looked_up.make_room()
        pulled = [one[rows[i]] if i in rows else one for i, one in enumerate(weights)]
        for variable, value in zip(model.trainable_variables, looked_up.placed(pulled), strict=True):
            variable.assign(value)
        computed = gradients_of(model, looked_up.fitted(state_of(model)), batch)
        computed = looked_up.collected(computed)
    assert [id(variable) for variable in model.trainable_variables] == before
    for i, gradient in expected.items():
        if i in rows:
            whole = np.zeros_like(gradient)
            whole[rows[i]] = computed[i]
        else:
            whole = computed[i]
        np.testing.assert_allclose(whole, gradient, rtol=1e-5, atol=1e-6)
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(variable.value), value)


def test_a_larger_batch_gets_more_room() -> None:
    model = compiled(functional)
    tables, _ = find_tables(model, lambda: X, adapter().steps().to_numpy)
    with LookedUpRows(tables, model) as looked_up:
        sizes = []
        for count in (4, 3, 5):
            first = {name: array[:count] for name, array in X.items()}
            looked_up.look_up(lambda first=first: first)
            changed = looked_up.make_room()
            sizes.append(
                (changed, [looked_up.fitted([[0] * 4])[0][i].shape[0] for i in sorted(tables.variables)])
            )
    assert [changed for changed, _ in sizes] == [True, False, True]
    assert {tuple(sorted(size)) for _, size in sizes} == {(8, 12), (16, 16)}


def test_a_step_that_reads_a_table_in_another_way_is_refused() -> None:
    model = compiled(Recommender)
    tables, _ = find_tables(model, lambda: X, adapter().steps().to_numpy)
    with LookedUpRows(tables, model) as looked_up:
        looked_up.look_up(lambda: X)
        looked_up.make_room()
        with pytest.raises(ModelError, match=r"reads the table of layer .* other than by lookups"):
            ops.mean(model.items.embeddings)
        model(X)
        with pytest.raises(ModelError, match="ids of the shape"):
            model.items(X["users"])
        with pytest.raises(ModelError, match="which do not follow from"):
            model({name: array[:5] for name, array in X.items()})


@pytest.mark.slow("<lambda>4", "<lambda>5", "<lambda>6", "<lambda>7", "<lambda>8")
@pytest.mark.ci("<lambda>2", "<lambda>3", "<lambda>4", "<lambda>5", "<lambda>6", "<lambda>7", "<lambda>8")
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), amsgrad=True),
        lambda: keras.optimizers.AdamW(0.1),
        lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.5),
        lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
        lambda: keras.optimizers.Adadelta(0.5),
        lambda: keras.optimizers.Adamax(0.1),
        lambda: keras.optimizers.Ftrl(0.1),
        lambda: keras.optimizers.Lion(0.1),
    ],
)
def test_rows_are_updated_as_by_the_optimizer_and_others_are_kept(
    make: Callable[[], Any], divided: bool
) -> None:
    """The twin is an update of the whole table, after which the other rows get their values from before."""
    model, backend = compiled(functional, make()), adapter().steps()
    variables, optimizer = model.trainable_variables, model.optimizer
    shapes = [(tuple(one.shape), 4) for one in variables]
    shards = place_variables(shapes, 1, FixedShardsPartitioner(2) if divided else None)
    tables = find_tables(model, lambda: X, backend.to_numpy)[0].variables
    served = ServedVariables(backend)
    twin = ServedVariables(backend, copies=True)
    served.add(Update(optimizer, variables), shards, tables)
    twin.add(Update(optimizer, variables), shards)

    def state(of: ServedVariables) -> dict[Any, np.ndarray]:
        keys = [*((k, -1) for k in range(len(shards))), *of.slots]
        return dict(zip(keys, [np.array(one) for one in of.changes()[0]], strict=False))

    known = state(twin)
    changed: dict[int, set[int]] = {}
    for step in range(4):
        gradients, rows = _draw(shards, shapes, tables, step)
        before = state(twin)
        twin.update(_whole(gradients, rows, shards))
        _keep_other_rows(twin, before, rows, shards)
        served.update(gradients, (0,), rows)
        for k, numbers in rows.items():
            changed.setdefault(k, set()).update(numbers.tolist())
    arrays, of_rows = served.changes()
    assert {k: set(numbers.tolist()) for k, numbers in of_rows.items()} == changed
    keys = [*((k, -1) for k in range(len(shards))), *served.slots]
    expected = state(twin)
    assert set(keys) == set(expected) == set(known)
    for key, array in zip(keys, arrays, strict=True):
        wanted = expected[key]
        if key[0] in of_rows:
            others = np.setdiff1d(np.arange(len(wanted)), of_rows[key[0]])
            np.testing.assert_array_equal(wanted[others], known[key][others])
            wanted = wanted[of_rows[key[0]]]
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6, err_msg=str(key))
    assert all(len(numbers) == 0 for numbers in served.changes()[1].values())


@pytest.mark.parametrize("taken", [0, 2])
def test_restored_shards_continue_with_equal_bits(taken: int) -> None:
    """A standby restores the state of a server and repeats its later updates."""
    model, backend = compiled(functional, keras.optimizers.Adam(0.1)), adapter().steps()
    variables = model.trainable_variables
    shapes = [(tuple(one.shape), 4) for one in variables]
    shards = place_variables(shapes, 1, FixedShardsPartitioner(2))
    tables = find_tables(model, lambda: X, backend.to_numpy)[0].variables
    server, standby = (ServedVariables(backend, copies=True) for _ in range(2))
    for one in (server, standby):
        one.add(Update(model.optimizer, variables), shards, tables)
    assert sum(array.nbytes for array in server.state()) == server.state_bytes

    def update(of: ServedVariables, step: int) -> None:
        gradients, rows = _draw(shards, shapes, tables, step)
        of.update(gradients, (0,), rows)

    for step in range(3):
        update(server, step)
        if step == taken:
            server.changes()
    standby.restore([array.copy() for array in server.state()])
    for one in (server, standby):
        update(one, 3)
    for again in (True, False):
        (arrays, rows), (other_arrays, other_rows) = (one.changes(again=again) for one in (server, standby))
        assert [array.tobytes() for array in arrays] == [array.tobytes() for array in other_arrays]
        assert {k: found.tolist() for k, found in rows.items()} == {
            k: found.tolist() for k, found in other_rows.items()
        }
    assert all(len(found) == 0 for found in rows.values())


def _draw(
    shards: tuple[Shard, ...], shapes: Any, tables: frozenset[int], step: int
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Return gradients of all shards, and of which rows of tables, none of one table in one step."""
    drawn = np.random.default_rng(step)
    gradients, rows = dict[int, np.ndarray](), dict[int, np.ndarray]()
    for k, shard in enumerate(shards):
        size = shard.stop - shard.start if shapes[shard.variable][0] else 0
        numbers = np.arange(size)
        if shard.variable in tables:
            count = 0 if step == 2 and not rows else 3
            rows[k] = numbers = np.sort(drawn.choice(size, count, replace=False))
        gradients[k] = drawn.normal(size=(len(numbers), *shapes[shard.variable][0][1:])).astype("float32")
    return gradients, rows


def _whole(
    gradients: Mapping[int, np.ndarray], rows: Mapping[int, np.ndarray], shards: tuple[Shard, ...]
) -> dict[int, np.ndarray]:
    found = dict(gradients)
    for k, numbers in rows.items():
        found[k] = np.zeros((shards[k].stop - shards[k].start, *gradients[k].shape[1:]), "float32")
        found[k][numbers] = gradients[k]
    return found


def _keep_other_rows(
    twin: ServedVariables, before: Any, rows: Mapping[int, np.ndarray], shards: tuple[Shard, ...]
) -> None:
    keys = [*((k, -1) for k in range(len(shards))), *twin.slots]
    kept: dict[Any, np.ndarray] = {}
    for key, array in zip(keys, twin.changes()[0], strict=True):
        if key[0] in rows:
            kept[key] = before[key].copy()
            kept[key][rows[key[0]]] = array[rows[key[0]]]
    values = {key[0]: array for key, array in kept.items() if key[1] == -1}
    twin.write(values, {key: array for key, array in kept.items() if key[1] != -1})


def test_nothing_is_replaced_in_a_model_without_tables() -> None:
    model = compiled(OwnLoss)
    tables, _ = find_tables(model, lambda: X, adapter().steps().to_numpy)
    with LookedUpRows(tables, model) as looked_up, nullcontext():
        assert looked_up.look_up(lambda: X) == {}
        assert not looked_up.make_room()
        assert "call" not in vars(model)


def test_a_snapshot_has_the_rows_as_they_were() -> None:
    model = text()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    variables = model.trainable_variables
    model.optimizer.build(variables)
    backend = adapter().steps()
    shapes = [(tuple(one.shape), 4) for one in variables]
    shards = place_variables(shapes, 1, FixedShardsPartitioner(2))
    tables = find_tables(model, lambda: None, backend.to_numpy)[0].variables
    served = ServedVariables(backend, copies=True)
    served.add(Update(model.optimizer, variables), shards, tables)
    positions = [k for k, shard in enumerate(shards) if shard.variable in tables]
    taken: list[tuple[Any, dict[int, np.ndarray]]] = []
    for step in range(6):
        values = served.values()
        taken.append((served.tables(), {k: values[k] for k in positions}))
        if step == 3:
            served.write({positions[0]: values[positions[0]] * 2}, {})
        gradients, rows = _draw(shards, shapes, tables, step)
        served.update(gradients, (0,), rows)
    for snapshots, values in taken:
        assert snapshots.keys() == values.keys()
        for k, value in values.items():
            for numbers in (np.arange(len(value)), np.array([1, len(value) - 1])):
                assert snapshots[k].rows(numbers).tobytes() == value[numbers].tobytes()
    assert taken[0][1][positions[0]].tobytes() != served.values()[positions[0]].tobytes()
