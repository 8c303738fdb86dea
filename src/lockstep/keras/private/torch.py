"""The private parts of PyTorch that Lockstep uses: only this file changes when PyTorch changes one.

Docstrings say what Lockstep relies on, in all versions of `docs/versions.md`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

_ITERATION = ("__iter__", "_get_iterator")


def scale_in_place(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors in place, with one kernel for all and the bits of `mul_`."""
    torch._foreach_mul_(tensors, factor)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the tensors' version counters, which all writes increase, including writes through views."""
    return [tensor._version for tensor in tensors]


def occurrences(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of a sparse tensor, which may have several values of one index."""
    return gradient._indices(), gradient._values()


def iterates_as_defined(loader_class: Any) -> bool:
    """Whether a class of loaders inherits `__iter__`, and `_get_iterator`, which creates iterations."""
    return all(getattr(loader_class, name) is getattr(DataLoader, name) for name in _ITERATION)


def keeps_iterator(loader: Any) -> bool:
    """Whether a loader has begun an iteration that it keeps, such as one with persistent workers."""
    return loader._iterator is not None


def normalizes(module: torch.nn.Module) -> bool:
    """Whether a module uses the statistics of a batch: PyTorch's classes of such have one base class."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def normalizing_or_dropping(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the inner modules that use batch statistics, or drop values at random, in training.

    PyTorch's classes of each kind have a common base class. The present mode of a module does not show how it
    trains, because each call of the layer that wraps the module sets the mode.
    """
    classes = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)
    modes = [(inner, inner.training) for inner in module.modules()]
    module.train()
    try:
        return [
            inner
            for inner, _ in modes
            if isinstance(inner, classes) and inner.training and getattr(inner, "p", 1) > 0
        ]
    finally:
        for inner, mode in modes:
            inner.training = mode
