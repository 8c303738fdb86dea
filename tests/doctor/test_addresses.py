"""`TF_CONFIG` in a shell: its effect on a script, and whether its addresses are usable."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lockstep.cluster.tf_config import parse
from lockstep.doctor import addresses
from lockstep.doctor.addresses import TaskAddress, judge_tf_config
from lockstep.doctor.check import Finding, Rating, Sources, judge, look, resolve_host
from lockstep.doctor.checkup import CHECKS
from lockstep.errors import ConfigError, PeerStuckError
from lockstep.hosts.where import GATHERING
from lockstep.rendezvous.addresses import check_free, has_place
from lockstep.rendezvous.waiting import WaitMessages
from lockstep.system.environment import tf_config

HOSTS = {"localhost": "127.0.0.1", "here": "127.0.0.1", "elsewhere": "192.0.2.1", "127.0.0.1": "127.0.0.1"}
"""192.0.2.1 belongs to no machine."""


def find(host: str) -> str:
    if host not in HOSTS:
        raise socket.gaierror(-2, "Name or service not known")
    return HOSTS[host]


def written(cluster: Any, kind: str = "worker", index: int = 0, **more: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}, **more})


def rows(text: str | None, **options: Any) -> dict[str, Finding]:
    checks = [check for check in CHECKS["environment"] if check.name == "TF_CONFIG"]
    environment = {} if text is None else {"TF_CONFIG": text}
    findings = judge(
        "environment", checks, look(checks, Sources(environment=environment, **{"resolve": find, **options}))
    )
    for finding in findings:
        assert bool(finding.remedy) == (finding.rating is Rating.WARNING)
        json.dumps(finding.facts)
    return {finding.name: finding for finding in findings}


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free() -> Callable[[], int]:
    """Return a function that returns free ports, each once."""
    given: set[int] = set()

    def port() -> int:
        with listening() as number:
            if number in given:
                return port()
            given.add(number)
            return number

    return port


def test_no_findings_without_the_variable() -> None:
    assert rows(None) == {}


@pytest.mark.parametrize("text", ["", "{'cluster'", "[1]", '{"cluster": {"worker": ["a"]}}', written({})])
def test_an_invalid_value_is_a_warning_with_its_fault(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    finding = rows(text)["TF_CONFIG"]
    assert finding.rating is Rating.WARNING
    assert finding.reason == str(caught.value)


def test_two_workers_on_this_machine_are_fine(free: Callable[[], int]) -> None:
    found = rows(written({"worker": [f"here:{free()}", f"here:{free()}"]}, index=1))
    assert list(found) == ["TF_CONFIG", "TF_CONFIG: addresses"]
    assert found["TF_CONFIG: addresses"].reason == "all 2 belong to this machine, and their ports are free"
    finding = found["TF_CONFIG"]
    assert finding.rating is Rating.WARNING
    assert "worker 1, one of 2 tasks that train: a script that is started by hand waits for worker 0" in (
        finding.reason
    )
    assert finding.reason.endswith("All addresses are loopback, as in an example")
    assert finding.remedy.startswith("unset TF_CONFIG if it is left over")


def test_the_stated_limit_is_that_of_a_script() -> None:
    patient = WaitMessages("worker 0", 0.0)
    patient.line(GATHERING - 1)
    with pytest.raises(PeerStuckError):
        patient.line(GATHERING)


def test_addresses_that_are_not_loopback_are_fine() -> None:
    text = written({"worker": ["a:1", "b:1"]})
    places = [TaskAddress("worker 0", "a:1", "10.0.0.1"), TaskAddress("worker 1", "b:1", "127.0.0.1")]
    assert [finding.rating for finding in judge_tf_config((text, places))] == [Rating.FINE] * 2
    assert judge_tf_config((text, places))[0].reason.startswith(
        "this process is worker 0, one of 2 tasks that train: a "
    )


def test_many_other_tasks_are_counted() -> None:
    text = written({"chief": ["a:1"], "worker": [f"a:{port}" for port in range(2, 12)]})
    reason = judge_tf_config((text, []))[0].reason
    assert "waits for chief 0, worker 1, worker 2, worker 3 and 6 more" in reason


def test_a_value_set_by_lockstep_run_is_a_warning() -> None:
    def never(host: str) -> str:
        raise AssertionError(host)

    [finding] = rows(tf_config(0, 2), resolve=never).values()
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith("a job of lockstep run has set it")


def test_a_single_training_task_is_a_warning(free: Callable[[], int]) -> None:
    found = rows(written({"worker": [f"localhost:{free()}"]}))
    assert found["TF_CONFIG"].rating is Rating.WARNING
    assert found["TF_CONFIG"].reason.startswith("worker 0 is the only task that trains")
    assert found["TF_CONFIG: addresses"].rating is Rating.FINE


def test_faults_of_unused_addresses_are_fine() -> None:
    with listening() as port:
        found = rows(written({"worker": ["nowhere:1"], "ps": [f"here:{port}", "elsewhere:1"]}))
    assert [finding.rating for finding in found.values()] == [Rating.WARNING] + [Rating.FINE] * 3
    for name in ("worker 0", "ps 0", "ps 1"):
        assert found[f"TF_CONFIG: {name}"].reason.endswith("; Lockstep does not use this address")


def test_a_parameter_server_and_an_evaluator() -> None:
    cluster = {"worker": ["here:1", "here:2"], "ps": ["here:3"]}
    finding = rows(written(cluster, "ps"))["TF_CONFIG"]
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith("this process is ps 0, which does nothing")
    finding = rows(written(cluster, "evaluator", 3))["TF_CONFIG"]
    assert finding.rating is Rating.FINE
    assert finding.reason.startswith("this process is the evaluator")


def test_an_unknown_host_is_a_warning(free: Callable[[], int]) -> None:
    found = rows(written({"worker": [f"here:{free()}", "nowhere:2"]}))
    finding = found["TF_CONFIG: worker 1"]
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith("nowhere:2: the host cannot be resolved (Name or service not known)")
    assert "waits" not in found["TF_CONFIG"].reason
    assert "TF_CONFIG: worker 0" not in found


def test_a_reserved_name_has_no_address() -> None:
    finding = rows(written({"worker": ["host.invalid:1", "127.0.0.1:2"]}), resolve=resolve_host)
    assert finding["TF_CONFIG: worker 0"].rating is Rating.WARNING


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_an_invalid_name_of_a_host_is_a_warning(host: str) -> None:
    found = rows(written({"worker": [f"{host}:1", "127.0.0.1:2"]}), resolve=resolve_host)
    assert "the host cannot be resolved" in found["TF_CONFIG: worker 0"].reason


def test_a_name_service_that_does_not_answer_is_a_warning(
    free: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, port = threading.Event(), free()
    # The limit counts from the last answer, so others may be slow.
    monkeypatch.setattr(addresses, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def slow(host: str) -> str:
        if host == "slow":
            answer.wait()
        return "127.0.0.1"

    hosts = [f"fast{number}:{port}" for number in range(40)]
    try:
        found = rows(written({"worker": ["slow:1", *hosts]}), resolve=slow, patience=0.5)
    finally:
        answer.set()
    assert found["TF_CONFIG: worker 0"].reason.startswith(
        "slow:1: the host could not be resolved within 0.5 s"
    )
    assert list(found) == ["TF_CONFIG", "TF_CONFIG: worker 0"]


def test_each_host_is_resolved_once_and_in_parallel() -> None:
    together, asked = threading.Barrier(3, timeout=300), []

    def meet(host: str) -> str:
        asked.append(host)
        together.wait()
        return "127.0.0.1"

    rows(written({"worker": ["a:1", "b:1", "c:1", "a:2"]}), resolve=meet, patience=60.0)
    assert sorted(asked) == ["a", "b", "c"]


def test_an_address_of_another_machine_is_a_warning() -> None:
    found = rows(written({"worker": ["here:1", "elsewhere:2"]}))
    finding = found["TF_CONFIG: worker 1"]
    assert finding.rating is Rating.WARNING
    assert finding.reason.startswith(
        "elsewhere:2 is not an address of this machine: workers that are started by hand"
    )
    assert finding.facts["here"] is False
    assert not has_place("192.0.2.1:2", "worker 1")


@pytest.mark.parametrize("index", [0, 1])
def test_the_user_of_a_port_is_named(free: Callable[[], int], index: int) -> None:
    with listening() as port:
        found = rows(written({"worker": [f"here:{free()}", f"here:{port}"]}, index=index))
        with pytest.raises(ConfigError, match="is in use by"):
            check_free(f"127.0.0.1:{port}", "worker 1")
    finding = found["TF_CONFIG: worker 1"]
    assert finding.rating is Rating.WARNING
    name = psutil.Process().name()
    assert finding.reason.startswith(f"here:{port} is in use by {name} (process {os.getpid()}): worker 1, ")
    assert "TF_CONFIG: worker 0" not in found


def test_another_process_that_uses_a_port_is_named(free: Callable[[], int]) -> None:
    script = (
        "import socket, sys\n"
        "server = socket.create_server(('0.0.0.0', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        found = rows(written({"chief": [f"localhost:{port}"], "worker": [f"here:{free()}"]}, "chief"))
        process.communicate()
    assert f"(process {process.pid})" in found["TF_CONFIG: chief 0"].reason


def test_a_listening_process_is_named_before_connected_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        [own] = [found for found in psutil.net_connections("tcp") if found.laddr.port == port]
        elsewhere = own._replace(laddr=own.laddr._replace(ip="127.0.0.2"), pid=1)
        speaks = own._replace(status=psutil.CONN_ESTABLISHED, pid=1)
        monkeypatch.setattr(psutil, "net_connections", lambda kind: [elsewhere, speaks, own])
        found = rows(written({"worker": [f"here:{port}", "here:1"]}))
    assert f"(process {os.getpid()})" in found["TF_CONFIG: worker 0"].reason


def test_the_user_of_a_port_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        text = written({"worker": [f"here:{port}", "here:1"]})
        mine = [found._replace(pid=None) for found in psutil.net_connections("tcp")]
        monkeypatch.setattr(psutil, "net_connections", lambda kind: mine)
        assert "by a process of another user" in rows(text)["TF_CONFIG: worker 0"].reason
        monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
        assert "by another program that is not visible" in rows(text)["TF_CONFIG: worker 0"].reason

        def refuse(kind: str) -> None:
            raise psutil.AccessDenied

        monkeypatch.setattr(psutil, "net_connections", refuse)
        assert "by another program that is not visible" in rows(text)["TF_CONFIG: worker 0"].reason


def test_a_port_with_a_closed_connection_is_free(free: Callable[[], int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        client.close()
    found = rows(written({"worker": [f"here:{port}", f"here:{free()}"]}))
    assert "TF_CONFIG: addresses" in found


def test_ipv6_addresses_are_supported(free: Callable[[], int]) -> None:
    text = written({"worker": [f"[::1]:{free()}", f"[::1]:{free()}"]})
    found = rows(text, resolve=resolve_host)
    if not Path("/proc/net/if_inet6").exists():
        assert "cannot be used here" in found["TF_CONFIG: worker 0"].reason
        return
    assert found["TF_CONFIG: addresses"].rating is Rating.FINE
    assert "loopback" in found["TF_CONFIG"].reason
