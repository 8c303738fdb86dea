"""Parameters of PyTorch that take the places of tables on servers while a function runs, in this process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lockstep.errors import ModelError
from lockstep.keras.parameter_server.table_rows import summed_by_row

torch = pytest.importorskip("torch")
functions = pytest.importorskip("lockstep.keras.parameter_server.torch_functions")
SHAPE = 101, 4
VALUES = np.random.default_rng(0).normal(size=SHAPE).astype("float32")


def summed(gradient: Any) -> list[bytes]:
    """The rows that have a gradient, and its bits."""
    ids, values = functions.rows_of(gradient)
    rows, places = np.unique(ids, return_inverse=True)
    return [rows.tobytes(), summed_by_row(values, places, len(rows)).tobytes()]


@pytest.fixture
def parameter() -> Any:
    return torch.nn.Parameter(torch.ones(1, 4))


@pytest.fixture
def stand_ins(parameter: Any) -> Any:
    found = functions.StandIns()
    found.add(parameter, "layer", SHAPE)
    yield found
    found.end()


def test_gradients_have_the_bits_of_a_sparse_embedding(parameter: Any, stand_ins: Any) -> None:
    weight = torch.nn.Parameter(torch.tensor(VALUES))
    scale = torch.tensor(np.random.default_rng(1).normal(size=(5, 3, 4)).astype("float32"))
    found = []
    for table in (parameter, weight):

        def rows(ids: Any, table: Any = table) -> Any:
            if table is weight:
                return torch.nn.functional.embedding(ids % 101, weight, sparse=True)
            return functions.rows_looked_up(lambda ids: VALUES[ids], ids, parameter, SHAPE)

        first = torch.arange(15, dtype=torch.int32).reshape(5, 3) % 4 - 2
        loss = (rows(first) ** 3 * scale).sum() + (rows(first[:0]) ** 2).sum()
        (loss + (rows(first[0].long()) ** 2 * 0.3).sum() + rows(torch.tensor(1)).sum()).backward()
        (rows(first) ** 2 * scale).mean().backward()
        assert functions.is_of_rows(table.grad, SHAPE)
        found.append(summed(table.grad * 0.1))
    assert found[0] == found[1]
    assert np.frombuffer(found[0][0], np.int64).tolist() == [0, 1, 99, 100]


@pytest.mark.parametrize(
    "read",
    [
        lambda one: one.sum(),
        lambda one: 2 * one,
        lambda one: torch.mm(torch.ones(1, 101), one),
        lambda one: torch.nn.functional.embedding(torch.tensor([1]), one),
        lambda one: torch._foreach_norm([one]),
        lambda one: one.data,
        lambda one: one.detach(),
        lambda one: one[0],
        lambda one: one.T,
        np.asarray,
        lambda one: one.add_(1),
    ],
)
def test_other_reads_than_lookups_are_refused(
    parameter: Any, stand_ins: Any, read: Callable[[Any], Any]
) -> None:
    functions.rows_looked_up(lambda ids: VALUES[ids], torch.tensor([3]), parameter, SHAPE).sum().backward()
    with pytest.raises(ModelError, match="reads the table of layer 'layer'"):
        read(parameter)


def test_gradients_can_be_read_and_removed(parameter: Any, stand_ins: Any) -> None:
    def loss() -> Any:
        return functions.rows_looked_up(
            lambda ids: VALUES[ids], torch.tensor([3, -1]), parameter, SHAPE
        ).sum()

    module = torch.nn.ParameterList([parameter])
    seen = []
    hook = parameter.register_hook(lambda gradient: seen.append(gradient.shape))
    loss().backward()
    hook.remove()
    assert tuple(parameter.shape) == SHAPE == tuple(seen[0])
    assert parameter.requires_grad
    expected = summed(parameter.grad)
    module.zero_grad()
    assert parameter.grad is None
    assert [summed(one) for one in torch.autograd.grad(loss(), [parameter])] == [expected]
    loss().backward()
    module.zero_grad(set_to_none=False)
    loss().backward()
    assert summed(parameter.grad) == expected
    with torch.no_grad():
        assert not loss().requires_grad


@pytest.mark.parametrize(
    "gradient",
    [
        lambda: torch.zeros(SHAPE),
        lambda: torch.zeros(102, 4).to_sparse(1),
        lambda: torch.zeros(SHAPE).to_sparse(),
        lambda: np.zeros(SHAPE),
    ],
)
def test_other_gradients_are_not_of_rows(gradient: Callable[[], Any]) -> None:
    assert not functions.is_of_rows(gradient(), SHAPE)


def test_a_parameter_is_as_before_and_its_results_too(parameter: Any) -> None:
    kept, kind = (parameter * 3).sum(), type(parameter)
    parameter.grad = torch.full((1, 4), 7.0)
    for _ in range(2):
        found = functions.StandIns()
        found.add(parameter, "layer", SHAPE)
        found.add(parameter, "layer", SHAPE)
        assert parameter.grad is None
        rows = functions.rows_looked_up(lambda ids: VALUES[ids], torch.tensor([3]), parameter, SHAPE)
        rows.sum().backward()
        assert tuple(parameter.grad.shape) == SHAPE
        with found.suspended():
            assert parameter.tolist() == [[1.0] * 4]
        assert tuple(parameter.shape) == SHAPE
        assert parameter.grad is None
        found.end()
        assert type(parameter) is kind
        assert parameter.tolist() == [[1.0] * 4]
        assert parameter.grad.tolist() == [[7.0] * 4]
    parameter.grad = None
    kept.backward()
    assert parameter.grad.tolist() == [[3.0] * 4]
