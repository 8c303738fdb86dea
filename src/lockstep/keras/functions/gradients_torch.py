"""Gradients through what replicas do together, on PyTorch; see `lockstep.keras.functions.gradients`."""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.keras.functions.gradients import Tensors


class _Through(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, meet: Any, gradient: Any, *leaves: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(meet(leaves))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return (None, None, *ctx.gradient(upstream))


def through(
    leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
) -> Tensors:
    """Return `meet(leaves)`, for which gradients are computed by `gradient`."""
    return list(_Through.apply(meet, gradient, *leaves))
