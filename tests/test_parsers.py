"""Every parser and decoder returns a value or raises its documented error, at once, for any input."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli.parameter_types import PARTS
from lockstep.cluster import slurm_step, tf_config
from lockstep.cluster.slurm import SlurmClusterResolver
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config_resolver import TFConfigClusterResolver
from lockstep.coordinator import admin_client
from lockstep.coordinator.admin_socket import address
from lockstep.errors import CheckpointError, ConfigError
from lockstep.launcher import gpu_assignment as devices
from lockstep.launcher import import_scan
from lockstep.protocol import admin as admin_messages
from lockstep.protocol import fork as fork_messages
from lockstep.protocol import host as host_messages
from lockstep.protocol import rendezvous as rendezvous_messages
from lockstep.protocol import worker as worker_messages
from lockstep.protocol.channel import Attachment
from lockstep.system import environment, invocation
from lockstep.transport.addresses import split_address
from lockstep.transport.keys import JobKey
from lockstep.transport.packet_channel import PacketDecoder
from lockstep.transport.state_memory import MemoryTransport

quick = settings(max_examples=50, deadline=None, derandomize=True, database=None)
words = st.text(max_size=6) | st.sampled_from(
    ["worker", "chief", "ps", "evaluator", "cluster", "task", "index", "type", "h:1", "host1:2222", "[::1]:3"]
)
leaves = st.none() | st.booleans() | st.integers(-(2**90), 2**90) | st.floats() | words | st.just("7" * 5000)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=12,
)
DEEP = ["[" * 100_000, '{"a":' * 100_000, "[" * 50_000 + "]" * 50_000]
texts = (
    anything.map(json.dumps)
    | st.text()
    | st.sampled_from([*DEEP, f'{{"cluster": {DEEP[2]}}}', "\ud800", '"\\ud800"', "NaN", "1" * 5000, "\0"])
)
clusters = st.builds(
    lambda cluster, task, others: json.dumps({"cluster": cluster, "task": task, **others}),
    st.dictionaries(words, anything, max_size=3),
    st.fixed_dictionaries({"type": anything, "index": anything}) | anything,
    st.dictionaries(st.sampled_from(["rpc_layer", "environment", "session_master"]), anything),
)

OF_MESSAGES = ("report", "arrival", "over")
KINDS = [
    *("started", "report", "waiting", "failed", "finished", "asks", "given", "stop", "view", "position"),
    *("leave", "over", "ask", "scale", "end", "status", "refused", "arrival", "patience", "admitted"),
]
FIELDS = [
    *("event", "fields", "what", "workers", "seconds", "status", "summary", "traceback", "blames", "whole"),
    *("view", "failure", "signal", "number", "reason", "job", "tasks", "seat", "version", "backend", "cores"),
    *(
        "gpus",
        "target",
        "worker",
        "joins",
        "environment",
        "agent",
        "connection",
        "imports",
        "folder",
        "since",
    ),
    *("since", "replicas", "joining", "wanted", "where", "pid", "script", "run_dir"),
]
packets = st.binary() | (
    texts
    | st.builds(
        lambda kind, fields: json.dumps({"type": kind, **fields}),
        st.sampled_from(KINDS),
        st.dictionaries(st.sampled_from(FIELDS), anything, max_size=5),
    )
    | st.sampled_from(
        [f'{{"type": "{kind}", "fields": {DEEP[2]}}}' for kind in ("report", "arrival", "over")]
    )
).map(lambda text: text.encode(errors="surrogatepass"))

hosts_texts = (
    st.text()
    | st.text("node[]-,0123456789 ()x", max_size=20)
    | st.sampled_from(["[0-9]" * 9, "[1-2]" * 2000, "[0-65535]" * 99, "[" * 5000, "n[1-3]," * 50_000 + "b"])
    | st.sampled_from(["1(x999999999)", "9" * 5000, "a" * 10**6, "a[0-99999999]"])
)
variable_texts = hosts_texts.filter(lambda text: "\0" not in text and text.isascii())
sources = st.text() | st.lists(
    st.sampled_from(
        [
            "import os",
            "import jax",
            "from . import x",
            "import beside",
            "def f(:",
            "x = " + "(" * 300,
            "x = " + "-" * 50_000 + "1",
            "a" + ".b" * 5000,
            "os.environ.setdefault('KERAS_BACKEND', 'jax')",
            "\0",
            "# -*- coding: nix -*-",
            "x = " + "+".join("1" * 5000),
        ]
    ),
    max_size=3,
).map("\n".join)
WORDS = ["python", "-c", "-m", "-", "--", "-X", "-W", "-um", "--check-hash-based-pycs", "-mx", "a.py"]
commands = st.lists(
    st.text(max_size=4)
    | st.sampled_from(
        ["python", "-c", "-m", "-", "--", "-X", "-W", "-um", "--check-hash-based-pycs", "-mx", "a.py"]
    ),
    max_size=6,
)
variables = {
    "LOCKSTEP_WORKER": "0",
    "LOCKSTEP_RUN_DIR": "/x",
    "LOCKSTEP_AGENT": "1",
    "LOCKSTEP_CONTROL_FD": "3",
}
environments = st.dictionaries(
    st.sampled_from(list(variables)), texts | st.sampled_from(["9" * 5000, "\u0661", "1_0", "-0"]), max_size=2
)


def use_cluster(cluster: Any) -> None:
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec) == spec
    assert repr(spec)
    for job in spec.jobs:
        assert [spec.task_address(job, index) for index in spec.task_indices(job)] or not spec.num_tasks(job)


def read_settings(data: bytes, folder: Path) -> None:
    (folder / "keras.json").write_bytes(data)
    _, configured = environment.keras_backend({"KERAS_HOME": str(folder)})
    assert configured is None or type(configured) is str


def foresee(source: str, folder: Path) -> None:
    for name in ("script.py", "beside.py"):
        (folder / name).write_bytes(source.encode(errors="surrogatepass"))
    import_scan.scan_imports(folder / "script.py", folder, {})


def show_jobs(packet: bytes) -> None:
    reply = admin_messages.decode_reply(packet)
    if isinstance(reply, admin_messages.Status):
        assert len(admin_client.table([reply], 0.0)) == 2


def unpack(data: bytes) -> None:
    descriptor = os.memfd_create("parcel")
    os.write(descriptor, data)
    MemoryTransport().fetch(Attachment(descriptor))


def ask_resolver(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CONFIG", text)
        resolver = TFConfigClusterResolver()
        asked: list[Callable[[], Any]] = [resolver.cluster_spec, resolver.master, lambda: resolver.task_type]
        for ask in (*asked, lambda: resolver.task_id, lambda: resolver.rpc_layer):
            try:
                ask()
            except (ConfigError, ValueError):
                continue


def find_jobs(data: bytes, folder: Path) -> None:
    # Listening sockets of this kind, with any names that the kernel accepts.
    lines = [line[:80] for line in data.split(b"\n")]
    start = b"0000000000000000: 00000002 00000000 00010000 0005 01 1 @" + address("").removeprefix(b"\0")
    (folder / "unix").write_bytes(b"\n".join([*lines, *(start + line for line in lines)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin_client, "_SOCKETS", folder / "unix")
        found = admin_client.running_jobs(0.01)
    assert not found.running


SLURM = ("PROCID", "NTASKS", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "NODELIST", "JOB_ID")


def ask_slurm(given: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in SLURM:
            patch.delenv(f"SLURM_{name}", raising=False)
        for name, value in given.items():
            patch.setenv(f"SLURM_{name}", value)
        resolver = SlurmClusterResolver()
        resolver.cluster_spec()
        resolver.get_task_info()


keys = st.text() | st.builds(
    "lockstep-key {} {} {}\n".format,
    st.sampled_from(["1", "2", "\u0661", "9" * 5000]),
    st.sampled_from(
        ["2100-01-01T00:00:00Z", "2100-02-30T00:00:00Z", "0000-01-01T00:00:00Z", "9999-12-31T24:61:00Z"]
    ),
    st.sampled_from(["0" * 64, "\u0660" * 64, "f" * 63]),
)
lengths = st.integers(0, 2**64 - 1).map(lambda length: length.to_bytes(8, "little"))
CASES: dict[str, tuple[Any, Callable[[Any], Any], tuple[type[Exception], ...]]] = {
    "TF_CONFIG": (texts | clusters, tf_config.parse, (ConfigError,)),
    "cluster of TF_CONFIG": (anything, tf_config.parse_cluster, (ConfigError,)),
    "index of TF_CONFIG": (anything, tf_config.parse_index, (ConfigError,)),
    "resolver": (clusters, ask_resolver, ()),
    "ClusterSpec": (anything | st.dictionaries(leaves, anything), use_cluster, (TypeError, ValueError)),
    "hosts": (hosts_texts, slurm_step.expand_hosts, (ConfigError,)),
    "counts": (hosts_texts, slurm_step.expand_counts, (ConfigError,)),
    "worker": (environments, lambda given: environment.read_worker(variables | given), (ConfigError,)),
    "what workers say": (packets, PacketDecoder(worker_messages.WorkerMessage).decode, (ValueError,)),
    "what agents say": (packets, PacketDecoder(worker_messages.AgentMessage).decode, (ValueError,)),
    "instructions": (packets, PacketDecoder(host_messages.Instruction).decode, (ValueError,)),
    "reports": (packets, PacketDecoder(host_messages.HostReport).decode, (ValueError,)),
    "orders": (packets, admin_messages.decode_request, (ValueError,)),
    "replies": (packets, show_jobs, (ValueError,)),
    "arrivals": (packets, rendezvous_messages.decode_arrival, (ValueError,)),
    "answers": (packets, rendezvous_messages.decode_answer, (ValueError,)),
    "births": (packets, fork_messages.decode_fork, (ValueError,)),
    "upbringings": (texts, fork_messages.ForkServerSetup.read, (ConfigError,)),
    "parcels": (packets | st.builds(bytes.__add__, lengths, packets), unpack, (CheckpointError,)),
    "task of Slurm": (
        st.dictionaries(st.sampled_from(slurm_step.STEP_VARIABLES), variable_texts),
        lambda found: slurm_step.SlurmTask.read(found.get),
        (ConfigError,),
    ),
    "Slurm": (st.dictionaries(st.sampled_from(SLURM), variable_texts), ask_slurm, (ConfigError, ValueError)),
    "keys": (keys, lambda text: JobKey.parse(text, "stdin"), (ConfigError,)),
    "addresses": (words | st.text("0123456789.:[]a"), split_address, (ConfigError,)),
    "numbers": (
        st.text() | st.integers().map(str) | st.just("9" * 5000),
        lambda text: PARTS.convert(text, None, None),
        (click.BadParameter,),
    ),
    "programs": (commands, invocation.parse, ()),
    "devices": (
        st.text() | st.text("0123+,-GPU") | st.just("9" * 5000),
        devices.parse_devices,
        (ConfigError,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_any_input_is_a_value_or_a_documented_error(name: str) -> None:
    strategy, parse, errors = CASES[name]

    @quick
    @given(strategy)
    def check(value: Any) -> None:
        with suppress(*errors):
            parse(value)

    check()


@pytest.mark.parametrize(
    ("strategy", "read"), [(packets, read_settings), (sources, foresee), (packets, find_jobs)]
)
def test_files_of_any_content(strategy: Any, read: Callable[[Any, Path], None], tmp_path: Path) -> None:
    quick(given(strategy)(lambda value: read(value, tmp_path)))()


def test_sockets_of_other_programs_with_names_that_are_no_text(tmp_path: Path) -> None:
    find_jobs(b"\xff" * 80, tmp_path)


def test_a_backend_in_keras_json_that_is_not_a_string(tmp_path: Path) -> None:
    read_settings(b'{"backend": ["jax"]}', tmp_path)
    read_settings(DEEP[0].encode(), tmp_path)


def test_arrays_beyond_the_size_of_a_parcel_allocate_no_memory() -> None:
    for kind, shape in (("float32", (2**40,)), ("float32", (-1, -1)), ("nix", (1,)), ("float32", (2**63, 0))):
        header = parcel_header(kind, shape)
        with pytest.raises(CheckpointError, match="cannot read the state from another worker"):
            unpack(len(header).to_bytes(8, "little") + header + bytes(100))


def parcel_header(kind: str, shape: tuple[int, ...]) -> bytes:
    return msgspec.msgpack.encode({"step": 1, "manifest": {}, "arrays": [["x", kind, shape]]})
