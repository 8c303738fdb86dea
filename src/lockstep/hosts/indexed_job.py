"""A job as objects of Kubernetes: an indexed Job, a Service that names its pods, a Secret with its key. Pure.

All pods have one template. `TF_CONFIG` tells them apart: Kubernetes replaces `$(JOB_COMPLETION_INDEX)` in it.
"""

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from lockstep.errors import ConfigError
from lockstep.protocol.host import LEFT_OUT
from lockstep.system.environment import KEY_FILE
from lockstep.system.exit_status import WRONG_STATE

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 63
_IMAGE = re.compile(r"[!-~]+")
_QUANTITIES = {
    "--cpu": (re.compile(r"(?=.*[1-9])(\d+(\.\d{1,3})?|\d+m)", re.ASCII), "such as 4 or 500m"),
    "--memory": (re.compile(r"0*[1-9]\d*([kMGT]|[KMGT]i)?", re.ASCII), "such as 8Gi"),
}
_MOST_TF_CONFIG = 128 * 1024 - len("TF_CONFIG=") - 1
"""Bytes of the value: Linux starts no process with a longer variable."""

_INDEX = "JOB_COMPLETION_INDEX"
_PORT = 2222
_KEYS = "/etc/lockstep"
_KEY = "job.key"
_CONTAINER = "lockstep"
_RETRIES = 6
_AFTER_GRACE = 10
"""Seconds for the workers to exit after the checkpoint."""


def name_from(script: str, *, module: bool) -> str:
    """Return the default name of a job that runs a script or a module; it may not be a valid one."""
    last = script.rpartition(".")[2] if module else PurePath(script).stem
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")


@dataclass(frozen=True)
class IndexedJob:
    """A job of Lockstep whose hosts are the pods of an indexed Job.

    Attributes:
        name: the name of all three objects, and the first part of the host names of the pods.
        image: the image of the container.
        pods: how many.
        command: the command of the container in every pod.
        grace: seconds for a checkpoint after SIGTERM.
        resources: the quantities of each pod, by the name of the option.

    Raises:
        ConfigError: Kubernetes would refuse a value.
    """

    name: str
    image: str
    pods: int
    command: tuple[str, ...]
    grace: float
    resources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"--name {self.name!r} is not a name for a Service: expected lower-case letters, digits and "
                "'-', beginning with a letter and not ending with '-'"
            )
        longest = _LONGEST_NAME - len(f"-{self.pods - 1}")
        if len(self.name) > longest:
            raise ConfigError(
                f"--name {self.name!r} has {len(self.name)} characters, at most {longest} fit: the host name "
                f"of the last pod is {self.name}-{self.pods - 1}, and a host name has at most {_LONGEST_NAME}"
            )
        if _IMAGE.fullmatch(self.image) is None:
            raise ConfigError(
                f"--image {self.image!r} is not an image: expected one such as registry/train:1"
            )
        for option, text in self.resources.items():
            pattern, example = _QUANTITIES[option]
            if pattern.fullmatch(text) is None:
                raise ConfigError(f"{option} {text!r} is not a quantity: expected one {example}")
        if (size := len(self._tf_config)) > _MOST_TF_CONFIG:
            raise ConfigError(
                f"the addresses of {self.pods} pods have {size} characters, but TF_CONFIG has room for "
                f"{_MOST_TF_CONFIG}; shorten --name, or use fewer --pods"
            )

    def objects(self, key: str) -> tuple[dict[str, Any], ...]:
        """Return the Secret, the Service and the Job, in the order in which they must be created.

        Args:
            key: the text of the key file.
        """
        return self._secret(key), self._service, self._job

    def _secret(self, key: str) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.name},
            # Another key would lock restarted pods out of a job that runs.
            "immutable": True,
            "stringData": {_KEY: key},
        }

    @property
    def _service(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name},
            "spec": {
                "clusterIP": "None",
                # A pod finds its own name before it is ready.
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": self.name},
            },
        }

    @property
    def _job(self) -> dict[str, Any]:
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name},
            "spec": {
                "completionMode": "Indexed",
                "completions": self.pods,
                "parallelism": self.pods,
                # Pod 0 coordinates the job: its success is that of the job, even while a lost pod restarts.
                "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
                "backoffLimitPerIndex": _RETRIES,
                "podFailurePolicy": {"rules": self._failure_rules},
                # The default with a failure policy, and essential: two pods 0 would be two coordinators.
                "podReplacementPolicy": "Failed",
                "template": {"spec": self._pod},
            },
        }

    @property
    def _failure_rules(self) -> list[dict[str, Any]]:
        """The rules for the end of a pod. The first match applies, and other ends count as retries."""

        def exits(action: str, operator: str, *values: int) -> dict[str, Any]:
            codes = {"containerName": _CONTAINER, "operator": operator, "values": list(values)}
            return {"action": action, "onExitCodes": codes}

        return [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            # Stopped from outside, or left without a job because another pod was lost.
            exits("Ignore", "In", LEFT_OUT, 128 + signal.SIGTERM),
            # A refusal or the script's own end, which a retry would repeat.
            exits("FailJob", "NotIn", WRONG_STATE, 128 + signal.SIGKILL),
        ]

    @property
    def _pod(self) -> dict[str, Any]:
        container: dict[str, Any] = {
            "name": _CONTAINER,
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
            ],
        }
        if self.resources:
            quantities = {option.removeprefix("--"): text for option, text in self.resources.items()}
            container["resources"] = {"requests": quantities, "limits": dict(quantities)}
        container["volumeMounts"] = [{"name": "key", "mountPath": _KEYS, "readOnly": True}]
        return {
            "subdomain": self.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(self.grace) + _AFTER_GRACE,
            "containers": [container],
            "volumes": [{"name": "key", "secret": {"secretName": self.name, "defaultMode": 0o400}}],
        }

    @property
    def _tf_config(self) -> str:
        addresses = [f"{self.name}-{index}.{self.name}:{_PORT}" for index in range(self.pods)]
        task = {"type": "worker", "index": f"$({_INDEX})"}
        return json.dumps({"cluster": {"worker": addresses}, "task": task})
