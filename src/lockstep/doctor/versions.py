"""Whether the versions of Python, Lockstep, Keras and the backends fit, and which backend a job would use."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from platform import python_version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from lockstep.doctor.check import Finding, Rating, Sources, failure, fine, warning
from lockstep.errors import LockstepError
from lockstep.launcher.backend import BACKENDS, INSTALLATION, Choice, choose_backend
from lockstep.system.prose import install_command

LOCKSTEP = "keras-lockstep"
_CPU_BUILDS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")}
"""The distributions that provide a backend, if there are several."""
_CHECKED = ("keras", "jaxlib", "tf-keras")
_PLUGINS = "jax-cuda"
_EXTRA = re.compile(r"""\bextra == ["']([^"']+)""")


@dataclass(frozen=True)
class Packages:
    """The packages that are installed for one Python.

    Attributes:
        versions: the versions of the packages, by canonical name.
        requirements: the requirements of each package, as in its metadata.
    """

    versions: Mapping[str, str]
    requirements: Mapping[str, tuple[str, ...]]

    @classmethod
    def installed(cls) -> "Packages":
        """Return the packages of this process."""
        distributions: dict[str, metadata.Distribution] = {}
        for distribution in metadata.distributions():
            fields = distribution.metadata
            # An interrupted installation leaves a folder without a name or a version. Of several
            # distributions with one name, Python imports the first one on the path.
            if "Name" in fields and "Version" in fields:
                distributions.setdefault(canonicalize_name(fields["Name"]), distribution)
        return cls(
            {name: each.version for name, each in distributions.items()},
            {name: tuple(each.requires or ()) for name, each in distributions.items()},
        )

    def provider(self, backend: str) -> str | None:
        """Return the distribution that provides a backend, or None if none is installed."""
        names = _CPU_BUILDS.get(backend, (backend,))
        return next((name for name in names if name in self.versions), None)

    def unmet(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a sentence for each unmet requirement of these distributions."""
        for name in names:
            try:
                yield from self._unmet(name)
            except (InvalidRequirement, InvalidVersion) as error:
                yield f"{name} {self.versions[name]} cannot be checked ({str(error).splitlines()[0]})"

    def _unmet(self, name: str) -> Iterator[str]:
        for requirement in map(Requirement, self.requirements.get(name, ())):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = self._version(requirement.name)
            if version is None:
                yield f"{name} {self.versions[name]} needs {requirement.name}, which is not installed"
            elif not requirement.specifier.contains(version, prereleases=True):
                yield (
                    f"{name} {self.versions[name]} needs {requirement.name}{requirement.specifier}, "
                    f"not {version}"
                )

    def extras(self) -> dict[str, bool]:
        """Return Lockstep's extras by name, each with whether everything that it needs is installed."""
        extras: dict[str, bool] = {}
        for requirement in map(Requirement, self.requirements.get(LOCKSTEP, ())):
            for extra in _EXTRA.findall(str(requirement.marker or "")):
                if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                    version = self._version(requirement.name)
                    fits = version is not None and requirement.specifier.contains(version, prereleases=True)
                    extras[extra] = extras.get(extra, True) and fits
        return dict(sorted(extras.items()))

    def lowest(self, name: str) -> Requirement | None:
        """Return Lockstep's requirement of a distribution, or that of the extra with its name; or None."""
        for requirement in map(Requirement, self.requirements.get(LOCKSTEP, ())):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": name})
            same = canonicalize_name(requirement.name) == canonicalize_name(name)
            if same and applies and requirement.specifier:
                return requirement
        return None

    def _version(self, name: str) -> str | None:
        name = canonicalize_name(name)
        names = _CPU_BUILDS.get(name, (name,))
        return next((self.versions[each] for each in names if each in self.versions), None)


@dataclass(frozen=True)
class Installation:
    """The packages that are installed for this Python.

    Attributes:
        packages: the installed packages.
        python: the interpreter's path.
        version: Python's version.
        importable: the backends that can be imported.
        choice: the backend that a job would use; None if it could not use one.
        refusal: why the job could not use one; empty if it could.
    """

    packages: Packages
    python: str
    version: str
    importable: tuple[str, ...]
    choice: Choice | None
    refusal: str = ""

    @property
    def chosen(self) -> str | None:
        """The name of the backend that a job would use, or None if it could not use one."""
        return None if self.choice is None else self.choice.backend


def look_at_installation(sources: Sources) -> Installation:
    """Look at the packages that are installed for this Python."""
    importable = tuple(filter(sources.is_importable, BACKENDS))
    choice, refusal = None, ""
    try:
        choice = choose_backend(sources.wishes, sources.is_importable, sys.executable)
    except LockstepError as error:
        refusal = str(error)
    return Installation(Packages.installed(), sys.executable, python_version(), importable, choice, refusal)


def judge_python(installation: Installation) -> Finding:
    """Name the interpreter."""
    version, executable = installation.version, installation.python
    return fine(f"{version}, {executable}", {"version": version, "executable": executable})


def judge_lockstep(installation: Installation) -> Finding:
    """Judge whether the requirements of Lockstep are known."""
    version = installation.packages.versions.get(LOCKSTEP)
    if version is None:
        return warning(
            "it is imported but not installed, so its requirements are unknown",
            "pip install . in its checkout, or pip install --editable .",
        )
    return fine(version, {"version": version})


def judge_keras(installation: Installation) -> Finding:
    """Judge whether Lockstep supports this Keras."""
    packages = installation.packages
    version, requirement = packages.versions.get("keras"), packages.lowest("keras")
    if version is None:
        return failure("is not installed", install_command("jax"))
    if requirement is not None and not requirement.specifier.contains(version, prereleases=True):
        needed = f"keras{requirement.specifier}"
        reason = f"{version}, but Lockstep needs {needed}"
        return failure(reason, f"pip install '{needed}'", {"version": version})
    return fine(version, {"version": version})


def judge_backend(backend: str, installation: Installation) -> Finding:
    """Judge whether Lockstep supports this version of a backend."""
    packages = installation.packages
    is_importable, is_chosen = backend in installation.importable, backend == installation.chosen
    facts: dict[str, object] = {"installed": is_importable, "chosen": is_chosen}
    if not is_importable:
        return fine("not installed", facts)
    provider, requirement = packages.provider(backend), packages.lowest(backend)
    version = packages.versions[provider] if provider is not None else None
    facts["version"] = version
    if version is None or requirement is None or requirement.specifier.contains(version, prereleases=True):
        by = f", by {provider}" if provider != backend else ""
        return fine(f"{version or 'of an unknown version'}{by}", facts)
    needed = f"{backend}{requirement.specifier}"
    return Finding(
        Rating.FAILURE if is_chosen else Rating.WARNING,
        f"{version}, but Lockstep needs {needed}",
        f"pip install '{needed}'",
        facts,
    )


def judge_choice(installation: Installation) -> Finding:
    """Name the backend that a job would use, and the reason."""
    choice = installation.choice
    if not installation.importable:
        return failure(f"no Keras backend is installed for {installation.python}", INSTALLATION)
    if choice is None:
        remedy = "set KERAS_BACKEND to a backend that is installed, or unset it"
        return failure(installation.refusal, remedy)
    reason = f"{choice.backend}, because {choice.reason}; set KERAS_BACKEND to choose another"
    return fine(reason, {"backend": choice.backend})


def judge_requirements(installation: Installation) -> Finding:
    """Judge whether the packages of a job fit together."""
    packages = installation.packages
    names = {LOCKSTEP, *_CHECKED, *filter(None, map(packages.provider, BACKENDS))}
    names |= {name for name in packages.versions if name.startswith(_PLUGINS)}
    unmet = list(packages.unmet(sorted(names & packages.versions.keys())))
    if not unmet:
        return fine("the requirements of all packages are met")
    return warning(
        "; ".join(unmet),
        "install compatible versions, in a new environment if necessary; pip check lists conflicts",
        {"unmet": unmet},
    )
