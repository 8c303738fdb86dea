"""Reports which framework the program imports, because that may take many silent seconds."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

from lockstep.observability.events import ImportStarted
from lockstep.worker.import_hooks import FRAMEWORKS, whenever_executed


def report_imports(publish: Callable[[ImportStarted], None], names: Iterable[str] = FRAMEWORKS) -> None:
    """Publish when the import of a module of these names begins, and which import continues after it.

    Args:
        publish: receives the events: the innermost module whose import is in progress, or an empty name.
        names: the names of modules that are not imported yet; others are not reported.
    """
    inside: list[str] = []

    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        inside.append(module.__name__)
        publish(ImportStarted(inside[-1]))
        try:
            yield
        finally:
            inside.remove(module.__name__)
            publish(ImportStarted(inside[-1] if inside else ""))

    whenever_executed(names, around)
