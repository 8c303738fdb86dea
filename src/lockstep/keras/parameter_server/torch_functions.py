"""Functions that look up rows of parameter servers on PyTorch: parameters with sparse gradients.

While a function runs, the parameter of a table has the shape of the table and holds no values. So its
gradient is a sparse tensor of the rows, like that of `torch.nn.Embedding(sparse=True)`, and passes through
the program's own code like any gradient.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import ModelError
from lockstep.keras.backends.torch_tensors import borrowed, to_numpy
from lockstep.keras.private.torch import occurrences

Array = npt.NDArray[Any]

_READABLE = frozenset(
    ("grad", "requires_grad", "shape", "ndim", "dtype", "device", "layout", "grad_fn", "retains_grad")
)
"""The attributes of a parameter that do not depend on its values, besides those that begin with `is_`."""

_CALLABLE = frozenset(
    (
        *("size", "dim", "numel", "nelement", "is_complex", "is_floating_point", "requires_grad_"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad", "backward"),
    )
)
"""The methods, and functions of `torch.autograd`, that do not depend on its values."""


class TableParameter(torch.nn.Parameter):  # type: ignore[misc]
    """The parameter of a table while a function runs. Reading its values raises ModelError.

    Attributes:
        layer: the path of the table's layer.
    """

    layer = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it reads or writes values."""
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_attribute = type(func).__name__ == "method-wrapper"
        allowed = (
            attribute in _READABLE or attribute.startswith("is_")
            if is_attribute
            else getattr(func, "__name__", "") in _CALLABLE
        )
        if not allowed:
            raise ModelError(
                f"a scheduled function reads the table of layer {cls.layer!r}, a ServerEmbedding, other "
                "than by lookups, such as in a loss or by torch.compile: use keras.layers.Embedding"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


class StandIns:
    """Gives parameters the shapes of their tables, in which they have gradients, until `end`."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, type, torch.Tensor, torch.Tensor | None]] = {}
        self._added: list[tuple[Any, str, tuple[int, int]]] = []

    def add(self, parameter: Any, layer: str, shape: tuple[int, int]) -> None:
        """Give a parameter the shape of its table, unless it has it.

        Args:
            parameter: the parameter of one row.
            layer: the path of the table's layer.
            shape: the shape of the table.
        """
        if id(parameter) in self._before:
            return
        self._before[id(parameter)] = parameter, type(parameter), parameter.data, parameter.grad
        self._added.append((parameter, layer, shape))
        # This takes no memory. If code reads a value anyway, NaNs show it.
        values = parameter.data.new_full((1, 1), torch.nan).expand(shape)
        _reshape(parameter, values)
        parameter.__class__ = _class_for(layer)

    def end(self) -> None:
        """Restore the shapes, values and gradients of all parameters."""
        for parameter, original_class, values, gradient in self._before.values():
            parameter.__class__ = original_class
            _reshape(parameter, values)
            parameter.grad = gradient
        self._before.clear()
        self._added.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within the block, all parameters have their old state. Afterwards, they do not have gradients."""
        added = list(self._added)
        self.end()
        try:
            yield
        finally:
            for arguments in added:
                self.add(*arguments)


@functools.cache
def _class_for(layer: str) -> type:
    return type(TableParameter.__name__, (TableParameter,), {"layer": layer})


def _reshape(parameter: Any, values: torch.Tensor) -> None:
    """Replace the values of a parameter with those of another shape, and remove its gradient."""
    parameter.grad = None
    # With another dtype, PyTorch forgets the node that accumulates gradients of the former shape. That node
    # exists as long as the program keeps a result that depends on the parameter.
    parameter.data = values[:0].to(torch.float16 if values.dtype != torch.float16 else torch.float32)
    parameter.data = values


class _Lookup(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, parameter: Any, ids: torch.Tensor, rows: torch.Tensor, shape: Any) -> Any:
        ctx.ids, ctx.shape = ids, shape
        return rows

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        ids, rows = ctx.ids.reshape(1, -1), upstream.reshape(-1, ctx.shape[1])
        with warnings.catch_warnings():
            # PyTorch 2.11 warns that it does not check anything, even if the caller requests that.
            warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
            gradient = torch.sparse_coo_tensor(ids, rows, ctx.shape, check_invariants=False)
        return gradient, None, None, None


def rows_looked_up(look_up: Callable[[Array], Array], ids: Any, variable: Any, shape: tuple[int, int]) -> Any:
    """Return the rows of ids; the gradient of the parameter is a sparse tensor of these rows.

    Args:
        look_up: returns the rows of ids.
        ids: the ids, of any shape.
        variable: the parameter in place of the table.
        shape: the shape of the table.
    """
    if ids.is_meta:
        # Keras asks only for shapes.
        return torch.empty((*ids.shape, shape[1]), dtype=variable.dtype, device="meta")
    rows = borrowed(look_up(to_numpy(ids)), variable.device)
    # These are positions in the table. A trial does not look up rows, so the ids have not been checked.
    positions = ids.to(variable.device, torch.int64).remainder(shape[0])
    return _Lookup.apply(variable, positions, rows, shape)


def is_of_rows(gradient: Any, shape: tuple[int, int]) -> bool:
    """Whether a gradient is a sparse tensor of rows of a table."""
    is_sparse = isinstance(gradient, torch.Tensor) and gradient.layout == torch.sparse_coo
    return is_sparse and tuple(gradient.shape) == shape and gradient.sparse_dim() == 1


def rows_of(gradient: Any) -> tuple[Array, Array]:
    """Return the ids of the lookups of such a gradient, and their gradients."""
    ids, values = occurrences(gradient)
    return to_numpy(ids[0]), np.array(to_numpy(values))
