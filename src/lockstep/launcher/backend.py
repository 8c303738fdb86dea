"""The choice of the Keras backend that the workers use, before anything imports Keras. Pure.

One rule applies to `lockstep run`, `lockstep.launch` and workers started by hand. The first of these settings
that exists decides:

    --backend                          the option of the command or argument of `launch`
    os.environ["KERAS_BACKEND"] = ...  in the script, which Keras obeys in any case
    KERAS_BACKEND                      in the environment
    os.environ.setdefault(...)         in the script
    the checkpoint                     from which the job resumes
    keras.json                         where it names JAX or PyTorch; Keras writes TensorFlow there unasked
    --tf-distribute                    asks for TensorFlow
    the first that is installed        of TensorFlow, JAX and PyTorch

So a script runs on the backend that Keras itself chooses for `python train.py`, or on another one if Keras
does not find one because TensorFlow is not installed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.errors import ConfigError, UnfitError
from lockstep.protocol.job_spec import BACKEND_NAMES
from lockstep.system.prose import install_command

BACKENDS = tuple(BACKEND_NAMES)
RULE = (
    "what SCRIPT sets, else KERAS_BACKEND, the checkpoint's backend, keras.json if it names jax or torch, "
    "tensorflow with --tf-distribute, or the first installed of tensorflow, jax and torch"
)
"""The default of `--backend`, as shown in the help."""
INSTALLATION = (
    f"install one: {install_command('jax')}, or pip install tensorflow-cpu, or PyTorch's CPU build "
    "(keras-lockstep[torch] takes 5 GB, with CUDA)"
)
"""The advice if no backend is installed."""

_WRITTEN_BY_KERAS = "tensorflow"
_BY_DEFAULT = (_WRITTEN_BY_KERAS, "jax", "torch")


@dataclass(frozen=True)
class Wishes:
    """The requests for a backend, by source, or None for a source without one.

    Attributes:
        option: the backend on the command line.
        script: the value to which the script sets `KERAS_BACKEND`.
        overrides: whether the script does so even if the variable is already set.
        variable: `KERAS_BACKEND`.
        checkpoint: the backend of the checkpoint that the job resumes from.
        configured: the backend in Keras's own configuration file.
        tf_distribute: whether names under `tf.distribute` are Lockstep's.
    """

    option: str | None = None
    script: str | None = None
    overrides: bool = False
    variable: str | None = None
    checkpoint: str | None = None
    configured: str | None = None
    tf_distribute: bool = False


@dataclass(frozen=True)
class Choice:
    """The backend, and the source of the choice."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"on {BACKEND_NAMES[self.backend]}, because {self.reason}"


def choose_backend(wishes: Wishes, installed: Callable[[str], bool], python: str) -> Choice:
    """Return the backend, and the reason.

    Args:
        wishes: the requests.
        installed: whether a backend can be imported.
        python: the interpreter to which `installed` applies, for messages.

    Raises:
        ConfigError: the requested backend is unknown, is not installed or contradicts the script; or none is
            installed.
    """
    if wishes.option and wishes.overrides and wishes.script != wishes.option:
        raise ConfigError(
            f"--backend {wishes.option}, but the script sets KERAS_BACKEND to {wishes.script}, which takes "
            "precedence: omit --backend, or remove the line from the script"
        )
    sources = (
        (wishes.option, f"--backend {wishes.option}", "--backend selects it"),
        (wishes.script if wishes.overrides else None, *_of_script(wishes.script)),
        (wishes.variable, f"KERAS_BACKEND={wishes.variable}", "KERAS_BACKEND selects it"),
        (wishes.script, *_of_script(wishes.script)),
        (wishes.checkpoint, f"checkpoint of {wishes.checkpoint}", "the checkpoint uses it"),
    )
    for wanted, source, reason in sources:
        if wanted:
            return Choice(_there(wanted, source, installed, python), reason)
    if (
        wishes.configured in BACKENDS
        and wishes.configured != _WRITTEN_BY_KERAS
        and installed(wishes.configured)
    ):
        return Choice(wishes.configured, "keras.json selects it")
    if wishes.tf_distribute:
        return Choice("tensorflow", "--tf-distribute requires it")
    for name in filter(installed, _BY_DEFAULT):
        return Choice(name, "it is the first installed of TensorFlow, JAX and PyTorch")
    raise ConfigError(f"no Keras backend is installed for {python}: {INSTALLATION}")


def require_tensorflow(installed: Callable[[str], bool], python: str) -> None:
    """Reject `--tf-distribute` if there is no `tf.distribute`.

    Raises:
        UnfitError: TensorFlow is not installed.
    """
    if not installed("tensorflow"):
        raise UnfitError(
            f"--tf-distribute: TensorFlow is not installed for {python}; install it there, or write "
            "lockstep.MultiWorkerMirroredStrategy instead of tf.distribute's, and omit the option"
        )


def refuse_legacy_keras(value: str | None, who: str = "the environment") -> None:
    """Reject a setting that makes `tf.keras` Keras 2, which Lockstep does not support.

    Args:
        value: the value of `TF_USE_LEGACY_KERAS`; None if it is not set.
        who: the place where it is set, for the message.

    Raises:
        ConfigError: the setting is on.
    """
    if is_legacy(value):
        raise ConfigError(
            f"{who} sets TF_USE_LEGACY_KERAS={value}, which makes tf.keras Keras 2: each worker would train "
            "its own model. Unset it, and use Keras 3"
        )


def is_legacy(value: str | None) -> bool:
    """Whether TensorFlow treats a value of `TF_USE_LEGACY_KERAS` as true."""
    return value in ("1", "true", "True")


def _of_script(value: str | None) -> tuple[str, str]:
    return f"the script's KERAS_BACKEND={value}", "the script sets KERAS_BACKEND"


def _there(wanted: str, source: str, installed: Callable[[str], bool], python: str) -> str:
    if wanted not in BACKENDS:
        raise ConfigError(f"{source}: expected one of {', '.join(BACKENDS)}")
    if not installed(wanted):
        raise ConfigError(f"{source}: not installed for {python}; install it there, or choose another")
    return wanted
