"""`lockstep export kubernetes`: manifests that the official client accepts, and pods that they start."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import chaos_steps
import pytest
import yaml
from host_network import Host, Running
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client import ApiClient
from kubernetes.utils.quantity import parse_quantity
from stepping_job import CHAOS, HERE

from lockstep.cli.main import main
from lockstep.errors import ConfigError
from lockstep.hosts.indexed_job import IndexedJob, amount, name_from
from lockstep.protocol.host import LEFT_OUT
from lockstep.system.exit_status import WRONG_STATE
from lockstep.transport.keys import JobKey

Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Export:
    """Run the command in this process; return its exit status, and what it has written."""

    def run(*arguments: str) -> tuple[int, str, str]:
        command = ["lockstep", "export", "kubernetes", "--image", "registry/train:1", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        assert isinstance(status, int)
        return status, *capfd.readouterr()

    return run


def exported(export: Export, *arguments: str) -> str:
    status, out, err = export(*arguments)
    assert status == 0
    assert err == "" or " --checkpoint" in err
    return out


def made(**fields: Any) -> IndexedJob:
    given: dict[str, Any] = {"name": "train", "image": "i", "pods": 2, "command": ("c",), "grace": 20.0}
    return IndexedJob(**given | fields)


def deserialized(document: Any, model: str) -> Any:
    """What the official client reads from a document and writes again."""
    client = ApiClient()
    # The public method has other arguments in each version.
    return client.sanitize_for_serialization(client._ApiClient__deserialize(document, model))


OPTIONS = ["-n", "4", "--pods", "2", "--cpu", "1.5", "--memory", "2Gi", "--gpus", "2", "--grace", "2m"]
MORE = ["--volume", "data:/data", "--volume", "saved:/saved/", "--volume", "data:/more", "--label", "a.b/c=d"]


def test_the_official_client_knows_every_field_and_its_type(export: Export) -> None:
    text = exported(export, *OPTIONS, *MORE, "--image-pull-secret", "registry", "--user", "7:8", "train.py")
    secret, service, job = yaml.safe_load_all(text)
    for document, model in ((secret, "V1Secret"), (service, "V1Service"), (job, "V1Job")):
        assert deserialized(document, model) == document
        assert document["metadata"]["name"] == "train"
        assert document["metadata"]["labels"]["a.b/c"] == "d"
    assert JobKey.parse(secret["stringData"]["job.key"], "the secret").secret
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"]) == (2, 2)
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["metadata"]["labels"]["a.b/c"] == "d"
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] == 130
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["volumes"][0]["secret"] == {"secretName": "train", "defaultMode": 0o400}
    (container,) = pod["containers"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    paths = {mount["mountPath"]: claims.get(mount["name"]) for mount in container["volumeMounts"]}
    assert paths == {"/etc/lockstep": None, "/tmp": None, "/data": "data", "/saved": "saved", "/more": "data"}
    wanted = {"cpu": "1.5", "memory": "2Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}


@pytest.mark.parametrize(
    ("options", "standby"),
    [
        ("", "train-1.train:2223"),
        ("--kind JobSet", "train-host-0-1.train:2223"),
        ("--kind TrainJob", "train-node-0-1.train:2223"),
        ("--standby train-2.train:7000", "train-2.train:7000"),
        ("--pods 1", None),
        ("--one-writer", None),
    ],
)
def test_checkpoints_in_a_store_bring_a_standby(export: Export, options: str, standby: str | None) -> None:
    words = ("-n", "3", "--checkpoint", "s3://bucket/a", *options.split(), "train.py")
    _, text, _ = export(*words)
    *_, job = yaml.safe_load_all(text.replace("kind: TrainJob", "kind: Last"))
    if job["kind"] == "Last":
        _, runtime, _ = yaml.safe_load_all(text)
        job = runtime["spec"]["template"]
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"] if "--kind" in options else job["spec"]
    assert deserialized(spec, "V1JobSpec") == spec
    command = spec["template"]["spec"]["containers"][0]["command"]
    if standby is None:
        assert "--standby" not in command
        assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    else:
        assert command[command.index("--standby") + 1] == standby
        assert command.count("--standby") == 1
        assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0-2", "succeededCount": 1}]}


def test_a_job_set_contains_the_same_job(export: Export) -> None:
    """Its fields are those of jobset.x-k8s.io/v1alpha2, whose controller makes the Service."""
    _, _, job = yaml.safe_load_all(exported(export, *OPTIONS, *MORE, "train.py"))
    secret, job_set = yaml.safe_load_all(exported(export, *OPTIONS, *MORE, "--kind", "JobSet", "train.py"))
    assert secret["kind"] == "Secret"
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    network = {"enableDNSHostnames": True, "subdomain": "train", "publishNotReadyAddresses": True}
    assert job_set["spec"].keys() == {"network", "replicatedJobs"}
    assert job_set["spec"]["network"] == network
    (replicated,) = job_set["spec"]["replicatedJobs"]
    template = replicated.pop("template")
    assert replicated == {"name": "host", "replicas": 1}
    assert deserialized(template, "V1JobTemplateSpec") == template
    # A controller names the pods NAME-host-0-INDEX.
    text = json.dumps(template["spec"]).replace("train-host-0", "train")
    assert json.loads(text) == job["spec"]
    assert "train-host-0-1.train:2222" in json.dumps(template)


def test_a_train_job_refers_to_a_runtime_with_the_same_job(export: Export) -> None:
    """The fields are those of trainer.kubeflow.org/v1alpha1. Its webhook requires what is checked here."""
    _, job_set = yaml.safe_load_all(exported(export, *OPTIONS, *MORE, "--kind", "JobSet", "train.py"))
    text = exported(export, *OPTIONS, *MORE, "--kind", "TrainJob", "train.py")
    secret, runtime, train_job = yaml.safe_load_all(text)
    assert secret["kind"] == "Secret"
    assert (runtime["kind"], train_job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert runtime["apiVersion"] == train_job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    named = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "train"}
    assert train_job["spec"] == {"runtimeRef": named}
    assert runtime["metadata"] == train_job["metadata"] == job_set["metadata"]
    assert runtime["spec"].keys() == {"mlPolicy", "template"}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2}
    template = runtime["spec"]["template"]
    assert template["metadata"]["labels"]["a.b/c"] == "d"
    (replicated,) = template["spec"]["replicatedJobs"]
    step = replicated["template"]["metadata"]["labels"].pop("trainer.kubeflow.org/trainjob-ancestor-step")
    assert (step, replicated["name"], replicated["replicas"]) == ("trainer", "node", 1)
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {"node"}
    # Otherwise, it is the JobSet, whose Job and container have other names.
    same = json.dumps(template["spec"]).replace("train-node-0", "train-host-0")
    same = same.replace('"name": "node"', '"name": "lockstep"').replace(
        '"containerName": "node"', '"containerName": "lockstep"'
    )
    same = same.replace('{"name": "lockstep", "replicas"', '{"name": "host", "replicas"')
    assert json.loads(same) == job_set["spec"]


def test_the_pod_security_standard_restricted_admits_the_pods(export: Export) -> None:
    """Its rules, as Kubernetes documents them."""
    *_, job = yaml.safe_load_all(exported(export, *OPTIONS, *MORE, "train.py"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
    kinds = [kind for volume in pod["volumes"] for kind in volume if kind != "name"]
    assert {*kinds} == {"secret", "emptyDir", "persistentVolumeClaim"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True
    # Processes of root keep a Secret that nobody else may read.
    (_, _, job) = yaml.safe_load_all(exported(export, "-n", "2", "--user", "0", "train.py"))
    assert not {"runAsNonRoot", "fsGroup"} & job["spec"]["template"]["spec"]["securityContext"].keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "without --checkpoint, in a --volume, the job starts over if all its pods are lost"),
        (
            "--checkpoint saved/a",
            "--checkpoint saved/a is not in a --volume, so checkpoints are lost with the pods; add for "
            "example --volume CLAIM:/saved --checkpoint /saved/a",
        ),
        ("--volume s:/saved --checkpoint /saved/../a", "give a --checkpoint below /saved"),
        ("--volume s:/saved --checkpoint /savedto", "give a --checkpoint below /saved"),
        ("--volume s:/saved --checkpoint /saved/a", ""),
        (
            "--checkpoint s3://bucket/a --run-dir s3://bucket/b",
            "the pods have no credentials for s3://bucket/a and s3://bucket/b: give them a service account",
        ),
        ("--checkpoint s3://bucket/a", "the pods have no credentials for s3://bucket/a: give them a service"),
        (
            "--volume s:/saved --checkpoint /saved/a --env A --env B=1 --notify env:URL",
            "the pods do not have the variable of --env A and --notify env:URL: add envFrom: with a Secret",
        ),
    ],
)
def test_checkpoints_that_would_be_lost_are_named(export: Export, options: str, said: str) -> None:
    status, _, err = export("-n", "2", *options.split(), "train.py")
    assert status == 0
    assert said in err if said else err == ""
    assert len(err.splitlines()) == bool(said)


SUFFIXES = ["", *"numkMGTPE", *(f"{letter}i" for letter in "KMGTPE"), "e3", "E2", "e-3", "e+1"]


@given(st.from_regex(r"\+?(\d{1,15}(\.\d{0,9})?|\.\d{1,9})", fullmatch=True), st.sampled_from(SUFFIXES))
def test_quantities_have_the_value_of_the_official_client(digits: str, suffix: str) -> None:
    digits = digits.translate({ord(digit): str(int(digit)) for digit in digits if digit.isdigit()})
    with localcontext(prec=60):
        assert amount(digits + suffix) == Fraction(parse_quantity(digits + suffix))


@pytest.mark.parametrize("text", ["", "1k1", "-1", "1 Gi", "1gi", "1K", "e3", "1e", ".", "1e3Mi", "٣"])
def test_other_texts_are_not_quantities(text: str) -> None:
    assert amount(text) is None


def test_a_pod_may_upload_the_end_of_its_run_folder(export: Export) -> None:
    *_, job = yaml.safe_load_all(exported(export, "-n", "2", "--run-dir", "s3://bucket/b", "train.py"))
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 20 + 60 + 10


def test_only_the_key_differs_between_outputs(export: Export) -> None:
    command = ("-n", "2", "-m", "package.some_module")
    one, other = (exported(export, *command).splitlines() for _ in range(2))
    (differing,) = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    assert all(line.startswith("  job.key: lockstep-key 1 ") for line in differing)
    assert "name: some-module" in "\n".join(one)


def test_words_reach_the_command_as_they_are(export: Export) -> None:
    """Also those that YAML, or only kubectl's YAML, or Kubernetes would replace."""
    words = ["1e-3", "y", "yes", "-1e3", "0o17", "", "$(HOME)", "$$", "a\nb", "-x", "# é ☃ 𝄞"]
    options = ["--replicas", "8", "--plain", "--seed", "3", "--timeout", "7.5"]
    text = exported(export, "-n", "4", *options, "-m", "train", *words)
    for word in words[:5]:
        assert f"- '{word}'\n" in text
    *_, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [expand(word, {"HOME": "/root"}) for word in container["command"]]
    assert command == [
        "lockstep",
        "run",
        "--tf-config",
        "--run-dir",
        "/tmp/runs/train",
        *options,
        "-m",
        "--",
        "train",
        *words,
    ]


def test_what_follows_from_the_end_of_a_pod() -> None:
    *_, job = made().objects("key")

    def action(status: int, *conditions: str) -> str:
        for rule in job["spec"]["podFailurePolicy"]["rules"]:
            if any(one["type"] in conditions for one in rule.get("onPodConditions", ())):
                return str(rule["action"])
            codes = rule.get("onExitCodes")
            if codes and (status in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
        return "Count"

    assert action(1, "DisruptionTarget") == "Ignore"
    assert [action(status) for status in (LEFT_OUT, 143)] == ["Ignore", "Ignore"]
    assert [action(status) for status in (WRONG_STATE, 137)] == ["Count", "Count"]
    assert [action(status) for status in (1, 2, 3, 139)] == ["FailJob"] * 4


LONG = "a" * 61


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["-n", "4", "--pods", "3", "train.py"],
            "3 pods cannot divide 4 workers evenly; change --pods or -n",
        ),
        (["-n", "2", "--name", "Train", "train.py"], "--name 'Train' is not a name for a Service"),
        (["-n", "2", "--name", "a-", "train.py"], "--name 'a-' is not a name for a Service"),
        (["-n", "2", "1st.py"], "--name '1st' is not a name for a Service"),
        (["-n", "11", "--name", LONG, "train.py"], "has 61 characters, at most 60 fit"),
        (["-n", "11", "--kind", "JobSet", "--name", "a" * 48, "train.py"], "at most 47 fit"),
        (
            ["-n", "2", "--cpu", "many", "train.py"],
            "--cpu 'many' is not a number of cores in whole thousandths",
        ),
        (["-n", "2", "--cpu", "0.0005", "train.py"], "--cpu '0.0005' is not a number of cores"),
        (
            ["-n", "2", "--memory", "0Gi", "train.py"],
            "--memory '0Gi' is not a whole number of bytes, such as",
        ),
        (["-n", "2", "--memory", "500m", "train.py"], "--memory '500m' is not a whole number of bytes"),
        (["-n", "2", "--volume", "saved", "train.py"], "--volume 'saved' is not CLAIM:PATH: expected"),
        (["-n", "2", "--volume", "a:b", "train.py"], "--volume 'a:b' is not CLAIM:PATH"),
        (["-n", "2", "--volume", "a:/etc", "train.py"], "--volume 'a:/etc' would hide /etc of the pods"),
        (["-n", "2", "--volume", "a:/b", "--volume", "c:/b/", "t.py"], "two --volume have the path /b"),
        (["-n", "2", "--image-pull-secret", "A", "train.py"], "--image-pull-secret 'A' is not the name of"),
        (["-n", "2", "--label", "a/b/c=d", "train.py"], "--label 'a/b/c=d' is not KEY=VALUE"),
        (["-n", "2", "--user", "me", "train.py"], "--user 'me' is not UID or UID:GID: expected numbers"),
        (["-n", "2", "--image", "", "train.py"], "--image '' is not an image"),
        (["-n", "2", "--replicas", "1", "train.py"], "replica"),
        (["-n", "2", "--min-workers", "3", "train.py"], "--min-workers 3 is more than the 2 workers"),
        (["-n", "2", "--grace", "long", "train.py"], "--grace long: give a time"),
        (["-n", "2", "--checkpoint-every", "x", "train.py"], "--checkpoint-every x"),
        (["-n", "2", "--keep", "2", "train.py"], "--keep needs --checkpoint DIR"),
        (["-n", "4096", "--name", "a" * 50, "train.py"], "characters, but TF_CONFIG has room for 131061"),
        (["-n", "2", "--hosts", "a", "train.py"], "No such option"),
        (["train.py"], "Missing option '-n'"),
    ],
)
def test_refusals_are_one_line(export: Export, arguments: list[str], said: str) -> None:
    status, out, err = export(*arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("standby", "said"),
    [
        ("train-1.train", "'train-1.train' is not an address; expected HOST:PORT"),
        ("train-1.train:2222", "--standby train-1.train:2222 has the port at which every pod listens"),
    ],
)
def test_a_standby_has_a_port_of_its_own(standby: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        made(standby=standby)


def test_the_longest_names_fit() -> None:
    assert made(name=LONG, pods=10).pods == 10
    with pytest.raises(ConfigError, match=r"at most 60 fit: the name of the last pod is a+-10, "):
        made(name=LONG, pods=11)
    assert name_from("folder.d/My_train.v2.py", module=False) == "my-train-v2"


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace references to variables as Kubernetes does."""

    def value(found: "re.Match[str]") -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)", value, text)


class Cluster:
    """Hosts whose commands run as the containers of pods."""

    def __init__(self, hosts: Sequence[Host], manifests: str) -> None:
        self._hosts = hosts
        self._secret, self._service, self._job = yaml.safe_load_all(manifests)

    @property
    def names(self) -> str:
        """The names of the pods, as lines of /etc/hosts."""
        name, service = self._job["metadata"]["name"], self._service["metadata"]["name"]
        pods = range(self._job["spec"]["completions"])
        return "".join(f"{self._hosts[pod].address} {name}-{pod}.{service}\n" for pod in pods)

    def start(self, index: int, **variables: str) -> Running:
        """Start the pod of an index, with the first process as process 1.

        It has the user, the privileges and the read-only root of the container. The root is that of the
        machine, so volumes are in the folder of the host, and the working folder is as writable as a volume.
        """
        host, pod = self._hosts[index], self._job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        secured, security = pod["securityContext"], container["securityContext"]
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        for variable in container["env"]:
            if "value" in variable:
                environment[variable["name"]] = expand(variable["value"], environment)
        paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in pod["volumes"]:
            folder = host.folder / f"mounted{paths[volume['name']]}"
            if "secret" in volume:
                self._mount(folder, volume["secret"], secured["fsGroup"])
            else:
                assert volume["emptyDir"] == {}
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                self._share(folder, secured["fsGroup"])
        self._share(host.work, secured["fsGroup"])
        mounted = host.here / "mounted"
        scratch = f"{mounted}{environment['HOME']}"
        key = f"{mounted}{environment['LOCKSTEP_KEY_FILE']}"
        environment |= {
            "LOCKSTEP_KEY_FILE": key,
            "HOME": scratch,
            "TMPDIR": scratch,
            "XDG_CACHE_HOME": scratch,
        }
        environment |= variables
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = [expand(word, environment) for word in container["command"]]
        naming = f"echo {self._job['metadata']['name']}-{index} > /proc/sys/kernel/hostname"
        assert security["readOnlyRootFilesystem"]
        beginning = f'{naming} && {_reachable(host)} mount -o remount,bind,ro / && exec "$@"'
        isolated = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        user = ["setpriv", f"--reuid={secured['runAsUser']}", f"--regid={secured['runAsGroup']}"]
        user += [f"--groups={secured['fsGroup']}", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        # Another user clears what `--kill-child` has set.
        user += ["--pdeathsig=KILL"]
        return host.start(*isolated, "sh", "-c", beginning, "sh", *user, *command, **environment)

    def _mount(self, folder: Path, volume: Mapping[str, Any], group: int) -> None:
        """Write the secret as a kubelet does, which replaces all of its files at once."""
        shutil.rmtree(folder, ignore_errors=True)
        assert volume["secretName"] == self._secret["metadata"]["name"]
        (data := folder / "..version").mkdir(parents=True)
        (folder / "..data").symlink_to(data.name)
        for name, text in self._secret["stringData"].items():
            (data / name).write_text(text)
            os.chown(data / name, 0, group)
            (data / name).chmod(volume["defaultMode"] | 0o040)
            (folder / name).symlink_to(f"..data/{name}")

    def _share(self, folder: Path, group: int) -> None:
        """Let the group of the pods write, as a kubelet does in a volume."""
        os.chown(folder, 0, group)
        folder.chmod(0o2775)


def _reachable(host: Host) -> str:
    """A beginning of a command after which every user reaches the interpreter, for this command alone."""
    base = Path(sys.base_prefix).resolve()
    closed = [folder for folder in base.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return ""
    aside = host.here / "interpreter"
    return (
        f"mkdir -p {aside} && mount --bind {base} {aside} && mount -t tmpfs -o mode=755 none {closed[-1]} && "
        f"mkdir -p {base} && mount --bind {aside} {base} && "
    )


@pytest.fixture
def cluster(hosts: Sequence[Host], export: Export) -> Iterator[Callable[..., Cluster]]:
    """Return the pods of a job, with two workers in each, and the names that the Service gives them."""
    names = hosts[0].here.parent / "names"
    # Users of pods pass through it.
    names.parent.chmod(0o711)
    before = names.read_text()

    def make(steps: int, *faults: str) -> Cluster:
        for host in hosts[:2]:
            for file in (HERE / "stepping.py", CHAOS / "chaos_steps.py", CHAOS / "chaos_faults.py"):
                shutil.copy(file, host.work)
        options = ["--backend", "jax", "--replicas", "5", "--run-dir", "run"]
        program = ["stepping.py", str(steps), *faults]
        pods = Cluster(hosts, exported(export, "-n", "4", "--pods", "2", *options, *program))
        names.write_text(before + pods.names)
        return pods

    yield make
    names.write_text(before)


def digests(first: Running) -> list[str]:
    """What the workers of all pods have printed; the first pod has the logs."""
    text = "".join(log.read_text() for log in (first.host.work / "run").glob("worker-*.log"))
    return re.findall(r"^digest (\S+)$", text, re.MULTILINE)


def test_a_job_in_pods(cluster: Callable[..., Cluster], lean_environment: dict[str, str]) -> None:
    pods = cluster(12)
    second, first = (pods.start(index, **lean_environment) for index in (1, 0))
    assert (first.end(), second.end()) == (0, 0), first.err
    assert digests(first) == [chaos_steps.alone(0, 5, 12)[-1]] * 4
    assert "4 workers on 2 hosts" in first.err


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_pod_is_replaced(
    cluster: Callable[..., Cluster], hosts: Sequence[Host], lean_environment: dict[str, str], how: int
) -> None:
    """The replacement joins with the state; the bits stay those of one machine."""
    pods = cluster(150, "0:3:after apply:crawl")
    first, second = (pods.start(index, **lean_environment) for index in (0, 1))
    second.wait_until(lambda: "made 4" in second.out)
    if how == signal.SIGKILL:
        second.process.kill()
    else:
        # As a kubelet does: to the first process of the container.
        (children,) = Path(f"/proc/{second.process.pid}/task").glob("*/children")
        os.kill(int(children.read_text()), how)
    assert second.end() == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: LEFT_OUT}[how]
    first.wait_until(lambda: "workers 0 and 1 continue" in first.err)
    again = pods.start(1, **lean_environment)
    again.wait_until(lambda: "made " in again.out)
    (hosts[0].work / "fast").touch()
    assert (first.end(), again.end()) == (0, 0), first.err
    assert digests(first) == [chaos_steps.alone(0, 5, 150)[-1]] * 4


@pytest.mark.slow
def test_the_pod_of_the_coordinator_takes_the_job_over(
    cluster: Callable[..., Cluster], hosts: Sequence[Host], lean_environment: dict[str, str]
) -> None:
    """The other pods continue without it; the bits stay those of one machine."""
    pods = cluster(150, *(f"{worker}:0:after apply:crawl" for worker in range(6)))
    first, second = (pods.start(index, **lean_environment) for index in (0, 1))
    second.wait_until(lambda: "made 4" in second.out)
    first.process.kill()
    again = pods.start(0, **lean_environment)
    again.wait_until(lambda: "workers 4 and 5 joined" in again.err)
    for host in hosts[:2]:
        (host.work / "fast").touch()
    assert (again.end(), second.end()) == (0, 0), again.err
    assert digests(again) == [chaos_steps.alone(0, 5, 150)[-1]] * 4
