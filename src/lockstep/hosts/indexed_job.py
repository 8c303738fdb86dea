"""A job as objects of Kubernetes: an indexed Job, a Service that names its pods, a Secret with its key. Pure.

All pods have one template. `TF_CONFIG` tells them apart: Kubernetes replaces `$(JOB_COMPLETION_INDEX)` in it.
A JobSet contains the same Job, and makes the Service itself. A TrainJob of Kubeflow makes such a JobSet from
a TrainingRuntime, which is an object of its own here.

The pods need no privilege, so the Pod Security Standard "restricted" admits them. They can write only to
their volumes: the root of the container is read-only, and `/tmp` is an empty volume.
"""

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import PurePath, PurePosixPath
from typing import Any, NamedTuple

from lockstep.errors import ConfigError
from lockstep.protocol.host import LEFT_OUT
from lockstep.protocol.job_spec import AFTER_GRACE
from lockstep.system.environment import KEY_FILE
from lockstep.system.exit_status import WRONG_STATE
from lockstep.transport.addresses import split_address

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 63
_IMAGE = re.compile(r"[!-~]+")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")
_QUANTITY = re.compile(
    r"\+?(\d{1,18}\.?\d{0,18}|\.\d{1,18})([numkMGTPE]|[KMGTPE]i|[eE]([-+]?\d{1,2}))?", re.ASCII
)
_POWERS = dict(zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True))
_QUANTITIES = {
    "cpu": (Fraction(1, 1000), "a number of cores in whole thousandths, such as 4, 500m or 0.5"),
    "memory": (Fraction(1), "a whole number of bytes, such as 8Gi, 8e9 or 500M"),
}
"""What a quantity is a multiple of, and how a message describes it."""
_GPU = "nvidia.com/gpu"
_MOST_TF_CONFIG = 128 * 1024 - len("TF_CONFIG=") - 1
"""Bytes of the value: Linux starts no process with a longer variable."""

_INDEX = "JOB_COMPLETION_INDEX"
_PORT, _STANDBY_PORT = 2222, 2223
_KEYS = "/etc/lockstep"
_KEY = "job.key"
_CONTAINER = "lockstep"
_SCRATCH = "/tmp"
_HOST = "host"
"""The name of the Job in a JobSet, for the host names of its pods."""
_NODE = "node"
"""The name that Kubeflow's controller requires for the container of a TrainJob, and its own runtimes use for
the Job."""
_TRAINER = "trainer.kubeflow.org"
RUNS = f"{_SCRATCH}/runs"
"""The folder of run folders in a pod."""
_RETRIES = 6


def name_from(script: str, *, module: bool) -> str:
    """Return the default name of a job that runs a script or a module; it may not be a valid one."""
    last = script.rpartition(".")[2] if module else PurePath(script).stem
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")


class Volume(NamedTuple):
    """A persistent volume claim, and the absolute path at which the pods have it."""

    claim: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "Volume":
        """Return the volume for a text CLAIM:PATH.

        Raises:
            ConfigError: the text has another form, or the pods use the path for something else.
        """
        claim, _, path = text.partition(":")
        whole = PurePosixPath(path)
        if not (_SUBDOMAIN.fullmatch(claim) and whole.is_absolute() and path.isprintable()) or ":" in path:
            raise ConfigError(
                f"--volume {text!r} is not CLAIM:PATH: expected the name of a PersistentVolumeClaim and an "
                "absolute path, such as saved:/saved"
            )
        if whole in (PurePosixPath("/"), PurePosixPath(_SCRATCH)) or PurePosixPath(_KEYS).is_relative_to(
            whole
        ):
            raise ConfigError(f"--volume {text!r} would hide {path} of the pods; give another path")
        return cls(claim, str(whole))

    def contains(self, path: PurePath) -> bool:
        """Return whether a path is in the volume; one that depends on the working folder is not."""
        return ".." not in path.parts and path.is_relative_to(self.path)


class User(NamedTuple):
    """The ids of the user and the group of the processes in the pods."""

    user: int = 1000
    group: int = 1000

    @classmethod
    def parse(cls, text: str) -> "User":
        """Return the user for a text UID or UID:GID; by default, the group has the number of the user.

        Raises:
            ConfigError: the text has another form.
        """
        user, colon, group = text.partition(":")
        ids = [user, group if colon else user]
        if not all(each.isascii() and each.isdigit() and int(each) < 2**31 for each in ids):
            raise ConfigError(f"--user {text!r} is not UID or UID:GID: expected numbers, such as 1000:1000")
        return cls(int(ids[0]), int(ids[1]))


def parse_label(text: str) -> tuple[str, str]:
    """Return the key and the value in a text KEY=VALUE.

    Raises:
        ConfigError: the text is not a label.
    """
    key, equals, value = text.partition("=")
    prefix, slash, name = key.rpartition("/")
    valid = _LABEL.fullmatch(name) and (not slash or _SUBDOMAIN.fullmatch(prefix))
    if not (equals and valid and (not value or _LABEL.fullmatch(value))):
        raise ConfigError(f"--label {text!r} is not KEY=VALUE: expected a label such as team=vision")
    return key, value


def amount(text: str) -> Fraction | None:
    """Return the value of a quantity in any notation of Kubernetes, or None for other texts."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    digits, suffix, exponent = match.groups()
    number = f"0{digits}" if digits.startswith(".") else digits.removesuffix(".")
    if suffix and suffix.endswith("i"):
        return Fraction(number) * (1 << 10 * ("KMGTPE".index(suffix[0]) + 1))
    return Fraction(f"{number}e{exponent or (_POWERS[suffix] if suffix else 0)}")


@dataclass(frozen=True)
class IndexedJob:
    """A job of Lockstep whose hosts are the pods of an indexed Job.

    Attributes:
        name: the name of all objects, and the first part of the host names of the pods.
        image: the image of the container.
        pods: the number of pods.
        command: the command of the container in every pod.
        grace: seconds after SIGTERM for a checkpoint, and for uploads.
        kind: the kind of the object with the pods: Job, JobSet or TrainJob.
        resources: the quantities of cpu and memory of each pod.
        gpus: the number of GPUs of each pod.
        volumes: the claims that all pods have.
        pull_secrets: the names of the secrets with which nodes get the image.
        labels: more labels of all objects and pods.
        user: the user of the processes in the pods.
        standby: HOST:PORT at which another pod takes over the job if pod 0 is lost; empty if there is none.

    Raises:
        ConfigError: Kubernetes would refuse a value.
    """

    name: str
    image: str
    pods: int
    command: tuple[str, ...]
    grace: float
    kind: str = "Job"
    resources: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    volumes: tuple[Volume, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    user: User = field(default_factory=User)
    standby: str = ""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"--name {self.name!r} is not a name for a Service: expected lower-case letters, digits and "
                "'-', beginning with a letter and not ending with '-'"
            )
        # The controller of a JobSet also wants room for the end of the name of a pod.
        last = f"{self._prefix}-{self.pods - 1}" + ("" if self.kind == "Job" else "-abcde")
        longest = _LONGEST_NAME - (len(last) - len(self.name))
        if len(self.name) > longest:
            raise ConfigError(
                f"--name {self.name!r} has {len(self.name)} characters, at most {longest} fit: the name of "
                f"the last pod is {last}, and has at most {_LONGEST_NAME}"
            )
        if _IMAGE.fullmatch(self.image) is None:
            raise ConfigError(
                f"--image {self.image!r} is not an image: expected one such as registry/train:1"
            )
        for resource, text in self.resources.items():
            unit, description = _QUANTITIES[resource]
            value = amount(text)
            if not value or value % unit:
                raise ConfigError(f"--{resource} {text!r} is not {description}")
        for secret in self.pull_secrets:
            if _SUBDOMAIN.fullmatch(secret) is None:
                raise ConfigError(f"--image-pull-secret {secret!r} is not the name of a Secret")
        paths = [volume.path for volume in self.volumes]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise ConfigError(f"two --volume have the path {twice}; give each its own path")
        if self.standby and split_address(self.standby)[1] == _PORT:
            raise ConfigError(
                f"--standby {self.standby} has the port at which every pod listens; give another port"
            )
        if (size := len(self._tf_config)) > _MOST_TF_CONFIG:
            raise ConfigError(
                f"the addresses of {self.pods} pods have {size} characters, but TF_CONFIG has room for "
                f"{_MOST_TF_CONFIG}; shorten --name, or use fewer --pods"
            )

    def objects(self, key: str) -> tuple[dict[str, Any], ...]:
        """Return the objects of the job, in the order in which they must be created.

        They are the Secret, the Service and the Job, or the Secret and the JobSet, or the Secret, the
        TrainingRuntime and the TrainJob.

        Args:
            key: the text of the key file.
        """
        if self.kind == "JobSet":
            return self._secret(key), self._job_set
        if self.kind == "TrainJob":
            return self._secret(key), self._training_runtime, self._train_job
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata, "spec": self._job}
        return self._secret(key), self._service, job

    def with_standby(self) -> "IndexedJob":
        """Return this job with pod 1 as its standby."""
        standby = f"{self._host_name(1)}:{_STANDBY_PORT}"
        return replace(
            self, standby=standby, command=(*self.command[:2], "--standby", standby, *self.command[2:])
        )

    def _host_name(self, index: int) -> str:
        """Return the name of a pod that the others resolve."""
        return f"{self._prefix}-{index}.{self.name}"

    @property
    def _prefix(self) -> str:
        """The name of the Job, with which the host names of its pods begin."""
        return self.name if self.kind == "Job" else f"{self.name}-{self._replicated}-0"

    @property
    def _replicated(self) -> str:
        """The name of the Job in a JobSet."""
        return _NODE if self.kind == "TrainJob" else _HOST

    @property
    def _container(self) -> str:
        return _NODE if self.kind == "TrainJob" else _CONTAINER

    @property
    def _labels(self) -> dict[str, str]:
        recommended = {"app.kubernetes.io/name": self.name, "app.kubernetes.io/managed-by": "lockstep"}
        return {**recommended, **self.labels}

    @property
    def _metadata(self) -> dict[str, Any]:
        return {"name": self.name, "labels": self._labels}

    def _secret(self, key: str) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata,
            # Another key would lock restarted pods out of a job that runs.
            "immutable": True,
            "stringData": {_KEY: key},
        }

    @property
    def _service(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata,
            "spec": {
                "clusterIP": "None",
                # A pod finds its own name before it is ready.
                "publishNotReadyAddresses": True,
                "selector": self._selector,
            },
        }

    @property
    def _selector(self) -> dict[str, str]:
        return {"batch.kubernetes.io/job-name": self._prefix}

    @property
    def _job_set(self) -> dict[str, Any]:
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata,
            "spec": self._job_set_spec(self._labels),
        }

    def _job_set_spec(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """Return the specification of a JobSet whose Job has these labels."""
        job = {"metadata": {"labels": dict(labels)}, "spec": self._job}
        return {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": self.name,
                "publishNotReadyAddresses": True,
            },
            "replicatedJobs": [{"name": self._replicated, "replicas": 1, "template": job}],
        }

    @property
    def _training_runtime(self) -> dict[str, Any]:
        # The label says which Job of the JobSet trains. Its number of pods is that of the policy.
        job_set = self._job_set_spec({**self._labels, f"{_TRAINER}/trainjob-ancestor-step": "trainer"})
        return {
            "apiVersion": f"{_TRAINER}/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": self._metadata,
            "spec": {
                "mlPolicy": {"numNodes": self.pods},
                "template": {"metadata": {"labels": self._labels}, "spec": job_set},
            },
        }

    @property
    def _train_job(self) -> dict[str, Any]:
        runtime = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": self.name}
        return {
            "apiVersion": f"{_TRAINER}/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata,
            "spec": {"runtimeRef": runtime},
        }

    @property
    def _job(self) -> dict[str, Any]:
        return {
            "completionMode": "Indexed",
            "completions": self.pods,
            "parallelism": self.pods,
            # Pod 0 or the standby coordinates the job: its success is that of the job, even while a lost pod
            # restarts. Other pods succeed only if it tells them that the job has succeeded.
            "successPolicy": {"rules": [self._success_rule]},
            "backoffLimitPerIndex": _RETRIES,
            "podFailurePolicy": {"rules": self._failure_rules},
            # The default with a failure policy, and essential: two pods 0 would be two coordinators.
            "podReplacementPolicy": "Failed",
            "template": {"metadata": {"labels": self._labels}, "spec": self._pod},
        }

    @property
    def _success_rule(self) -> dict[str, Any]:
        if not self.standby:
            return {"succeededIndexes": "0"}
        return {"succeededIndexes": f"0-{self.pods - 1}", "succeededCount": 1}

    @property
    def _failure_rules(self) -> list[dict[str, Any]]:
        """The rules for the end of a pod. The first match applies, and other ends count as retries."""

        def exits(action: str, operator: str, *values: int) -> dict[str, Any]:
            codes = {"containerName": self._container, "operator": operator, "values": list(values)}
            return {"action": action, "onExitCodes": codes}

        return [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            # The pod was stopped from outside, or has no job because another pod was lost.
            exits("Ignore", "In", LEFT_OUT, 128 + signal.SIGTERM),
            # The job was refused, or the script has ended by itself. A retry would repeat both.
            exits("FailJob", "NotIn", WRONG_STATE, 128 + signal.SIGKILL),
        ]

    @property
    def _pod(self) -> dict[str, Any]:
        container: dict[str, Any] = {
            "name": self._container,
            "image": self.image,
            # Kubernetes replaces $(NAME) in a command, and $$ by $.
            "command": [word.replace("$", "$$") for word in self.command],
            "env": [
                # Named here because a value can refer only to variables before it.
                {
                    "name": _INDEX,
                    "valueFrom": {
                        "fieldRef": {
                            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                        }
                    },
                },
                {"name": "TF_CONFIG", "value": self._tf_config},
                {"name": KEY_FILE, "value": f"{_KEYS}/{_KEY}"},
                # The user may have no home folder and no name in the image.
                {"name": "HOME", "value": _SCRATCH},
                {"name": "USER", "value": _CONTAINER},
            ],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        quantities = dict(self.resources) | ({_GPU: str(self.gpus)} if self.gpus else {})
        if quantities:
            container["resources"] = {"requests": quantities, "limits": dict(quantities)}
        claims = list(dict.fromkeys(volume.claim for volume in self.volumes))
        container["volumeMounts"] = [
            {"name": "key", "mountPath": _KEYS, "readOnly": True},
            {"name": "scratch", "mountPath": _SCRATCH},
            *(
                {"name": f"volume-{claims.index(volume.claim)}", "mountPath": volume.path}
                for volume in self.volumes
            ),
        ]
        pod: dict[str, Any] = {
            # A JobSet sets it too.
            "subdomain": self.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(self.grace + AFTER_GRACE),
            "securityContext": self._security,
            # If possible, the loss of a node costs few pods.
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": self._selector},
                }
            ],
            "containers": [container],
            "volumes": [
                {"name": "key", "secret": {"secretName": self.name, "defaultMode": 0o400}},
                {"name": "scratch", "emptyDir": {}},
                *(
                    {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
                    for number, claim in enumerate(claims)
                ),
            ],
        }
        if self.pull_secrets:
            pod["imagePullSecrets"] = [{"name": secret} for secret in self.pull_secrets]
        return pod

    @property
    def _security(self) -> dict[str, Any]:
        user, group = self.user
        security = {"runAsUser": user, "runAsGroup": group, "seccompProfile": {"type": "RuntimeDefault"}}
        if user == 0:
            return security
        # The group may read the key and write to volumes.
        owner = {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
        return {"runAsNonRoot": True, **security, **owner}

    @property
    def _tf_config(self) -> str:
        addresses = [f"{self._host_name(index)}:{_PORT}" for index in range(self.pods)]
        task = {"type": "worker", "index": f"$({_INDEX})"}
        return json.dumps({"cluster": {"worker": addresses}, "task": task})
