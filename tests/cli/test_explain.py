"""`lockstep explain` finds classes and messages on the page of errors."""

import ast
import contextlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep import errors
from lockstep.cli.explain import explanation
from lockstep.errors import ConfigError
from lockstep.observability.growth import GrowingMap
from lockstep.observability.host_loads import HostLoads, WorkerLoads
from lockstep.observability.measurements import STEP_PARTS
from lockstep.observability.slowness import advise
from lockstep.observability.step_parts import CallTimes, WorkerTimes

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
SOURCE = Path(errors.__file__).parent
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]


def literal(node: ast.AST) -> str:
    """Return the text of a literal, with `...` for what it inserts; empty if it is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value) or "..." for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@pytest.fixture(scope="module")
def raised() -> list[tuple[str, str]]:
    """The class and the message of each error that Lockstep raises with a literal."""
    calls = [
        node
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES
    ]
    found = [(call.func.id, literal(call.args[0])) for call in calls if call.args]  # type: ignore[attr-defined]
    return [(name, message) for name, message in found if message]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("form", ["{}", "lockstep.errors.{}"])
def test_a_class_is_explained(name: str, form: str) -> None:
    shown = explanation(PAGE, form.format(name))
    assert shown.startswith(f"{name}\n\n")
    assert "\n## " not in shown
    assert shown == explanation(PAGE, name.lower())


@pytest.mark.parametrize(
    ("message", "error", "advice"),
    [
        (
            "worker 1: PeerLostError: parameter server 3 has ended; its log says why; "
            "no standby has its weights (train.py:7)",
            "PeerLostError",
            "keras.callbacks.BackupAndRestore",
        ),
        (
            "layer 'words' looks up row 12, but its table has 10 rows: negative ids",
            "DataError",
            "check the ids",
        ),
        ("lockstep: there is no job 'x9'", "ConfigError", "use a name from `lockstep list`"),
        ("OneDeviceStrategy trains one replica, but this job has 4", "ConfigError", "MirroredStrategy"),
        (
            "cannot connect to 192.168.7.1:99: Connection refused; tried again for 3 s",
            "UnreachableError",
            "firewalls",
        ),
    ],
)
def test_a_message_is_found_whatever_its_names_and_numbers(message: str, error: str, advice: str) -> None:
    shown = explanation(PAGE, message)
    assert shown.startswith(f"{error}: ")
    assert advice in shown


def test_every_hint_is_explained() -> None:
    fast, slow = {"compute": 1.0}, {"compute": 9.0}
    delayed = HostLoads(2, 1, busy=2.0, workers={0: WorkerLoads(1, cores=0.2, delayed=0.7)})
    calls = (
        *({0: times(**{part: 5.0}, **fast)} for part in ("input", "exchange", "update")),
        *({0: times(nested=5.0, calls={call: 5.0})} for call in ("validation", "predict")),
        {0: times(other=5.0)},
        {0: times(compute=5.0, compiled=4, compiling=3.0)},
        {0: times(**fast), 1: times(**slow)},
        {0: times(replicas=20, compute=2.0), 1: times(wait=1.0, **fast)},
        {0: times(compute=0.01, wait=1.0), 1: times(compute=0.01, wait=1.0)},
        {0: times(examples=20, compute=0.1, update=0.1, wait=0.9)},
        {0: times(wait=9.0, **fast), 1: times(wait=9.0, **fast)},
        {0: times(wait=9.0, **fast)},
        {0: times(replicas=0, wait=9.0), 1: times(wait=9.0, **fast)},
    )
    found = {advise(CallTimes("fit 1", workers_of(call))) for call in calls}
    found.add(advise(CallTimes("fit 1", workers_of({0: times(**fast)}), hosts={"box": delayed})))
    assert len(found) == 15
    assert all(len(hints) == 1 for hints in found), found
    found = {hint for (hint,) in found}
    for hint in found:
        assert explanation(PAGE, hint).startswith("Hints: "), hint


def workers_of(call: Mapping[int, WorkerTimes]) -> GrowingMap[WorkerTimes]:
    workers: GrowingMap[WorkerTimes] = GrowingMap()
    for worker, sums in call.items():
        workers = workers.plus(worker, sums)
    return workers


def times(
    replicas: int = 10,
    examples: int = 640,
    calls: Mapping[str, float] | None = None,
    compiled: int = 0,
    compiling: float = 0.0,
    **parts: float,
) -> WorkerTimes:
    """Return the times of 10 steps of a worker."""
    return WorkerTimes(
        steps=10,
        examples=examples,
        replicas=replicas,
        parts=dict.fromkeys(STEP_PARTS, 0.0) | parts,
        calls=dict(calls or {}),
        compiled=compiled,
        compiling=compiling,
        shapes=compiled,
    )


def test_the_line_of_a_call_is_explained_by_its_hint() -> None:
    line = (
        "lockstep: fit 1: 1,991 examples/s with 2 workers; input 69 %, compute 7 %, wait 11 %, exchange 2 %, "
        "update 3 %, other 7 %; reading takes 69 % of the time: cache or prefetch the data, or "
        "do less work per example (see 'input' in the documentation)"
    )
    shown = explanation(PAGE, line)
    assert shown.startswith("Hints: ")
    assert "(see 'input' in the documentation)" in shown
    assert "docs/" not in shown


@pytest.mark.parametrize("message", ["xyz", "the worker", "this is not a message of Lockstep at all"])
def test_an_unknown_message_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match="no message like this is known"):
        explanation(PAGE, message)


def test_every_message_of_the_page_finds_itself() -> None:
    rows = [line.split("` | ") for line in PAGE.splitlines() if line.startswith("| `")]
    # The last one is of a program.
    rows = [row for row in rows if "MissingShard" not in row[0]]
    assert len(rows) > 50
    for message, advice in rows:
        shown = explanation(PAGE, message.removeprefix("| `"))
        assert message.removeprefix("| `") in shown or advice[:20] in shown


@pytest.mark.ci
def test_every_error_is_explained_as_its_class(raised: list[tuple[str, str]]) -> None:
    assert len(raised) > 450
    for name, message in raised:
        assert explanation(PAGE, f"lockstep: {name}: {message}").startswith((f"{name}: ", f"{name}\n\n"))
        # Without its code, it is not mistaken for a message of another class.
        with contextlib.suppress(ConfigError):
            assert explanation(PAGE, message).startswith(f"{name}: "), message


def test_a_code_without_a_known_message_shows_the_class() -> None:
    assert explanation(PAGE, "worker 2: DataError: unheard of (a.py:3)") == explanation(PAGE, "DataError")
    # A class of a program is none of Lockstep's.
    with pytest.raises(ConfigError, match="no message like this is known"):
        explanation(PAGE, "SomeError: unheard of")


def test_the_command_lists_the_classes_and_refuses_in_one_line() -> None:
    command = [sys.executable, "-m", "lockstep", "explain"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [*CLASSES, "Hints"]
    refused = subprocess.run([*command, "no", "such", "thing"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
