"""The fork server: its workers find the state of a new process."""

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.collectives.shared.pool import SharedPool
from lockstep.launcher.fork_server import ForkServerPlan
from lockstep.launcher.import_scan import NOTHING, ImportScan
from lockstep.launcher.launcher import Launch, LocalHandle, LocalLauncher
from lockstep.protocol.channel import Attachment
from lockstep.protocol.job_spec import JobSettings
from lockstep.protocol.worker import Welcome
from lockstep.system.environment import WorkerIdentity, job_environment, tf_config, worker_environment
from lockstep.system.prctl import adopt_orphans

PATIENCE = 300_000


class Workers:
    """Starts workers of one job, one at a time, and reads what they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher: LocalLauncher | None = None
        self._handles: list[LocalHandle] = []

    def plan(self, script: str, scan: ImportScan = NOTHING) -> None:
        path = self.folder / "script.py"
        path.write_text(script)
        self.launcher = LocalLauncher(ForkServerPlan((str(path),), job_environment(5, 1), scan=scan))

    def start(self, worker: int = 1) -> LocalHandle:
        assert self.launcher is not None
        while (descriptor := self.launcher.prepare()) is not None:
            wait_for(descriptor)
        handle = self.launcher.start(Launch(worker, self._environment(worker)))
        self._handles.append(handle)
        handle.channel.send(
            Welcome(
                Attachment(SharedPool.create().fd), JobSettings(replicas=2, seed=5, threads=1, adopts=False)
            )
        )
        return handle

    def output(self, worker: int = 1) -> tuple[int | None, str, str]:
        """Start a worker; return its exit status and its output."""
        handle = self.start(worker)
        texts = []
        for descriptor in (handle.stdout, handle.stderr):
            os.set_blocking(descriptor, True)
            with open(descriptor, closefd=False) as stream:
                texts.append(stream.read())
        wait_for(handle.exited)
        return handle.poll(), texts[0], texts[1]

    def close(self) -> None:
        if self.launcher is not None:
            self.launcher.close()
        for handle in self._handles:
            handle.send_signal(signal.SIGKILL)
            wait_for(handle.exited)
            handle.poll()
            handle.close()

    def _environment(self, worker: int) -> Callable[[int], dict[str, str]]:
        def environment(control: int) -> dict[str, str]:
            identity = WorkerIdentity(worker, self.folder, os.getpid(), control, joins=True)
            return worker_environment(identity, job_environment(5, 1), cluster=tf_config(worker, 2))

        return environment


def wait_for(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    adopt_orphans()
    made = Workers(tmp_path)
    yield made
    made.close()


def importing(folder: Path, source: str) -> ImportScan:
    (folder / "foreseen.py").write_text(source)
    return ImportScan(("foreseen",), str(folder))


def test_a_worker_is_a_child_with_its_own_session_and_environment(workers: Workers) -> None:
    workers.plan(
        "import os, json\n"
        "task = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "ours = [name for name in os.environ if name.startswith('LOCKSTEP_')]\n"
        "print(os.getppid(), os.getsid(0) == os.getpid(), task, ours, len(os.listdir('/proc/self/task')))\n"
    )
    assert workers.output(0) == (0, f"{os.getpid()} True 0 [] 1\n", "")
    assert workers.output(1) == (0, f"{os.getpid()} True 1 [] 1\n", "")


def test_the_script_has_the_collector_of_cyclic_garbage(workers: Workers, tmp_path: Path) -> None:
    """The fork server itself imports modules without it."""
    script = """
import foreseen, gc, weakref
class Node:
    pass
node = Node()
node.itself, gone = node, weakref.ref(node)
del node
kept = []
while gone() and len(kept) < 100_000:
    kept.append([])
print(foreseen.collected, gone() is None)
"""
    workers.plan(script, importing(tmp_path, "import gc\ncollected = gc.isenabled()\n"))
    assert workers.output() == (0, "False True\n", "")


def test_modules_are_imported_once_and_each_worker_repeats_their_output(
    workers: Workers, tmp_path: Path
) -> None:
    source = "import os, sys\nprint('imported'); print('oh', file=sys.stderr)\nwhere = os.getpid()\n"
    workers.plan(
        "import foreseen, os, sys\nprint(foreseen.where == os.getpid(), sys.path[0], sys.argv)\n",
        importing(tmp_path, source),
    )
    expected = f"imported\nFalse {tmp_path} ['{tmp_path / 'script.py'}']\n"
    assert workers.output(0) == (0, expected, "oh\n")
    assert workers.output(1) == (0, expected, "oh\n")


@pytest.mark.ci
@pytest.mark.parametrize(
    "source",
    [
        "raise RuntimeError",
        "import os; os._exit(3)",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
)
def test_modules_that_the_server_cannot_import_are_imported_in_the_worker(
    workers: Workers, tmp_path: Path, source: str
) -> None:
    workers.plan("import sys; print('foreseen' in sys.modules)", importing(tmp_path, source))
    assert workers.output() == (0, "False\n", "")


def test_pyarrow_starts_no_thread_in_the_fork_server(workers: Workers, tmp_path: Path) -> None:
    """Keras imports pandas where it is installed, which imports pyarrow."""
    pytest.importorskip("pyarrow")
    workers.plan("import sys; print('foreseen' in sys.modules)", importing(tmp_path, "import pyarrow"))
    assert workers.output() == (0, "True\n", "")


def test_a_lost_fork_server_is_replaced(workers: Workers, tmp_path: Path) -> None:
    workers.plan(
        "import foreseen, os\nprint(foreseen.where)\n", importing(tmp_path, "import os\nwhere = os.getpid()")
    )
    first = int(workers.output()[1])
    ended = os.pidfd_open(first)
    os.kill(first, signal.SIGKILL)
    wait_for(ended)
    os.close(ended)
    second = int(workers.output()[1])
    assert second not in (first, os.getpid())


def test_random_numbers_do_not_depend_on_the_importing_process(workers: Workers, tmp_path: Path) -> None:
    script = "import random\nimport numpy\nprint(random.random(), numpy.random.rand())\n"
    workers.plan(script, importing(tmp_path, "import random, numpy\nrandom.random()\nnumpy.random.rand()\n"))
    with_it = workers.output(0)
    assert workers.launcher is not None
    workers.launcher.close()
    workers.plan(script)
    assert workers.output(1)[1] == with_it[1]
    assert with_it[0] == 0


def test_the_fork_server_ends_when_the_launcher_closes(workers: Workers, tmp_path: Path) -> None:
    workers.plan(
        "import foreseen\nprint(foreseen.where)\n", importing(tmp_path, "import os\nwhere = os.getpid()")
    )
    parent = os.pidfd_open(int(workers.output()[1]))
    assert workers.launcher is not None
    workers.launcher.close()
    wait_for(parent)
    os.close(parent)


def test_a_fork_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    nowhere = {"PYTHONHOME": str(tmp_path)}
    launcher = LocalLauncher(
        ForkServerPlan(("script.py",), nowhere, scan=ImportScan(("foreseen",), str(tmp_path)))
    )
    for _ in range(2):
        descriptor = launcher.prepare()
        assert descriptor is not None
        wait_for(descriptor)
    with pytest.raises(OSError, match="the fork server failed to start"):
        launcher.prepare()
