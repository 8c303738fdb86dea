"""A stranger in the network of a job changes nothing, and learns nothing."""

import base64
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from host_network import Host
from stepping_job import SteppingJob

from lockstep.hosts.job_on_hosts import _DAYS
from lockstep.protocol.greeting import decode_greeting
from lockstep.transport.keys import JobKey

HERE = Path(__file__).parent
SECRET = bytes(range(100, 132))
KNOWN_KEY = f"""
import secrets
random_bytes = secrets.token_bytes
secrets.token_bytes = lambda count: {SECRET!r} if count == {len(SECRET)} else random_bytes(count)
"""
STEPS, FIRST, LAST = 500, 3, 495


def places(hosts: Sequence[Host]) -> Iterator[tuple[str, bytes]]:
    """Everything of a job that others may read."""
    for host in hosts:
        for pid in host.processes():
            for name in ("cmdline", "environ"):
                yield f"{host.name} {pid} {name}", Path(f"/proc/{pid}/{name}").read_bytes()
        for path in host.folder.rglob("*"):
            if path.is_file() and path.name != "sitecustomize.py":
                yield str(path), path.read_bytes()


def greeting_key(greeting: bytes) -> bytes:
    """The key that signs greetings of the job; shows that the key of the job is `SECRET`."""
    latest = int(time.time() + _DAYS * 24 * 3600)
    for expires in range(latest, latest - 600, -1):
        key = JobKey(SECRET, expires).mint(encrypted=False).greeting_key
        with contextlib.suppress(ValueError):
            decode_greeting(greeting, key)
            return key
    raise AssertionError("the job has another key")


def leaks(hosts: Sequence[Host], *secrets: bytes) -> list[str]:
    """Where others could find secrets of a job."""
    needles = [b"PRIVATE KEY"]
    for secret in secrets:
        needles += [secret, secret.hex().encode(), base64.b64encode(secret)[:-4], repr(secret).encode()[2:-1]]
    searched = dict(places(hosts))
    assert len(searched) > 30
    return [f"{name}: {needle!r}" for name, data in searched.items() for needle in needles if needle in data]


@pytest.mark.slow
def test_strangers(hosts: Sequence[Host]) -> None:
    """During a port scan, garbage, floods, slow connections and replays, a job makes its steps."""
    (known := hosts[0].work / "known").mkdir()
    (known / "sitecustomize.py").write_text(KNOWN_KEY)
    shutil.copy(HERE / "recorder.py", hosts[1].work)
    shutil.copy(HERE / "stranger.py", hosts[2].work)
    recorder = hosts[1].start(sys.executable, "recorder.py")
    recorder.wait_until(lambda: "records" in recorder.out)
    faults = [f"0:{FIRST}:after apply:hold", f"0:{FIRST}:after apply:pace", f"0:{LAST}:after apply:hold"]
    job = SteppingJob(
        hosts[:2],
        "--hosts node1,node2:2 --checkpoint saved --checkpoint-every 2",
        STEPS,
        *faults,
        PYTHONPATH=str(hosts[0].here / "work/known"),
        # Compiled, the module with the key would be a second file that has it.
        PYTHONDONTWRITEBYTECODE="1",
    )
    job.wait_held(FIRST)
    assert recorder.end() == 0, recorder.err
    assert list(hosts[0].work.glob("saved/*"))
    secrets = SECRET, greeting_key((hosts[1].work / "received").read_bytes())
    assert leaks(hosts[:2], *secrets) == []
    for name in ("received", "sent"):
        shutil.copy(hosts[1].work / name, hosts[2].work)
    (port,) = hosts[1].listening()
    job.go(FIRST)
    stranger = hosts[2].start(sys.executable, "stranger.py", hosts[1].address, str(port), "received", "sent")
    made = [job.steps(0)]
    for phase in ("scanned", "garbage", "many", "replayed", "slow"):
        stranger.wait_until(lambda phase=phase: phase in stranger.out)  # type: ignore[misc]
        made.append(job.steps(0))
    assert stranger.end() == 0, stranger.err
    assert made[-1] < LAST
    # The slow connection was open for the longest time.
    assert made[-1] - made[-2] > 10, made
    job.hurry()
    job.go(LAST)
    assert set(job.finish()) == {0, 1, 2}
    assert leaks(hosts[:2], *secrets) == []
    refused = [line for line in job.running.err.splitlines() if "refused" in line]
    assert all(line.startswith("lockstep: node2: refused ") for line in refused)
    assert all(hosts[2].address in line for line in refused)
    assert "no step completed" not in job.running.err
    assert job.events("lost") == []
