"""Ray finds the nodes of a job, starts an agent on each, and keeps the coordinator alive. `fit` is public."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.keras.state.report_callback import ReportCallback
    from lockstep.ray.fitting import FitResult, Scaling, fit

__all__ = ["FitResult", "ReportCallback", "Scaling", "fit"]

_HOMES = {
    "FitResult": "lockstep.ray.fitting",
    "ReportCallback": "lockstep.keras.state.report_callback",
    "Scaling": "lockstep.ray.fitting",
    "fit": "lockstep.ray.fitting",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `import lockstep.ray` loads neither Ray nor Keras."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lockstep.ray' has no attribute {name!r}")
