"""Whether the versions of Python, Lockstep, Keras and the backends fit, and which backend a job would use."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from lockstep.doctor.finding import Finding, Rating, Section
from lockstep.errors import LockstepError
from lockstep.launcher.backend import BACKENDS, Wishes, choose_backend

_ROWS = Section("versions")

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
        versions: by canonical name.
        requirements: of each package, as in its metadata.
    """

    versions: Mapping[str, str]
    requirements: Mapping[str, tuple[str, ...]]

    @classmethod
    def installed(cls) -> "Packages":
        """Return the packages of this process."""
        found: dict[str, metadata.Distribution] = {}
        for distribution in metadata.distributions():
            fields = distribution.metadata
            # An interrupted installation leaves a folder without a name or a version. Of several
            # distributions with one name, Python imports the first one on the path.
            if "Name" in fields and "Version" in fields:
                found.setdefault(canonicalize_name(fields["Name"]), distribution)
        return cls(
            {name: each.version for name, each in found.items()},
            {name: tuple(each.requires or ()) for name, each in found.items()},
        )

    def provider(self, backend: str) -> str | None:
        """Return the distribution that provides a backend; None if none is installed."""
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
            found = self._found(requirement.name)
            if found is None:
                yield f"{name} {self.versions[name]} needs {requirement.name}, which is not installed"
            elif not requirement.specifier.contains(found, prereleases=True):
                yield (
                    f"{name} {self.versions[name]} needs {requirement.name}{requirement.specifier}, "
                    f"not {found}"
                )

    def extras(self) -> dict[str, bool]:
        """Return Lockstep's extras by name, each with whether everything that it needs is installed."""
        found: dict[str, bool] = {}
        for requirement in map(Requirement, self.requirements.get(LOCKSTEP, ())):
            for extra in _EXTRA.findall(str(requirement.marker or "")):
                if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                    version = self._found(requirement.name)
                    fits = version is not None and requirement.specifier.contains(version, prereleases=True)
                    found[extra] = found.get(extra, True) and fits
        return dict(sorted(found.items()))

    def lowest(self, name: str) -> Requirement | None:
        """Return Lockstep's requirement of a distribution, or that of the extra with its name; or None."""
        for requirement in map(Requirement, self.requirements.get(LOCKSTEP, ())):
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": name})
            same = canonicalize_name(requirement.name) == canonicalize_name(name)
            if same and applies and requirement.specifier:
                return requirement
        return None

    def _found(self, name: str) -> str | None:
        name = canonicalize_name(name)
        names = _CPU_BUILDS.get(name, (name,))
        return next((self.versions[each] for each in names if each in self.versions), None)


def examine_versions(
    packages: Packages, python: str, version: str, wishes: Wishes, installed: Callable[[str], bool]
) -> tuple[list[Finding], str | None]:
    """Return the findings, and the backend that a job would use; None if it could not use any.

    Args:
        packages: the installed packages.
        python: the interpreter's path.
        version: of Python.
        wishes: the user's requests for a backend.
        installed: whether a backend can be imported.
    """
    findings = [
        _ROWS.fine("Python", f"{version}, {python}", version=version, executable=python),
        _of_lockstep(packages),
        _of_keras(packages),
    ]
    chosen, why = _choose(wishes, installed, python)
    findings += [_of_backend(packages, backend, installed(backend), chosen) for backend in BACKENDS]
    findings.append(why)
    checked = {
        name
        for name in (LOCKSTEP, *_CHECKED, *map(packages.provider, BACKENDS))
        if name is not None and name in packages.versions
    }
    plugins = (name for name in packages.versions if name.startswith(_PLUGINS))
    findings.append(_of_requirements(list(packages.unmet(sorted({*checked, *plugins})))))
    return findings, chosen


def _of_lockstep(packages: Packages) -> Finding:
    version = packages.versions.get(LOCKSTEP)
    if version is None:
        return Finding(
            "versions",
            "Lockstep",
            Rating.WARNING,
            "it is imported but not installed, so its requirements are unknown",
            "pip install . in its checkout, or pip install --editable .",
        )
    return _ROWS.fine("Lockstep", version, version=version)


def _of_keras(packages: Packages) -> Finding:
    version, wanted = packages.versions.get("keras"), packages.lowest("keras")
    if version is None:
        return Finding(
            "versions", "Keras", Rating.FAILURE, "is not installed", "pip install 'keras-lockstep[jax]'"
        )
    if wanted is not None and not wanted.specifier.contains(version, prereleases=True):
        return Finding(
            "versions",
            "Keras",
            Rating.FAILURE,
            f"{version}, but Lockstep needs keras{wanted.specifier}",
            f"pip install 'keras{wanted.specifier}'",
            {"version": version},
        )
    return _ROWS.fine("Keras", version, version=version)


def _of_backend(packages: Packages, backend: str, importable: bool, chosen: str | None) -> Finding:
    name = packages.provider(backend)
    facts = {"installed": importable, "chosen": backend == chosen}
    if not importable:
        return Finding("versions", backend, Rating.FINE, "not installed", "", facts)
    version = packages.versions[name] if name is not None else None
    wanted = packages.lowest(backend)
    if version is None or wanted is None or wanted.specifier.contains(version, prereleases=True):
        text = f"{version or 'of an unknown version'}{f', by {name}' if name != backend else ''}"
        return Finding("versions", backend, Rating.FINE, text, "", {**facts, "version": version})
    return Finding(
        "versions",
        backend,
        Rating.FAILURE if backend == chosen else Rating.WARNING,
        f"{version}, but Lockstep needs {backend}{wanted.specifier}",
        f"pip install '{backend}{wanted.specifier}'",
        {**facts, "version": version},
    )


def _choose(wishes: Wishes, installed: Callable[[str], bool], python: str) -> tuple[str | None, Finding]:
    try:
        choice = choose_backend(wishes, installed, python)
    except LockstepError as error:
        return None, Finding(
            "versions",
            "chosen backend",
            Rating.FAILURE,
            str(error),
            "set KERAS_BACKEND to a backend that is installed, or unset it",
        )
    return choice.backend, _ROWS.fine(
        "chosen backend",
        f"{choice.backend}, because {choice.reason}; set KERAS_BACKEND to choose another",
        backend=choice.backend,
    )


def _of_requirements(unmet: list[str]) -> Finding:
    if not unmet:
        return _ROWS.fine("requirements", "the requirements of all packages are met")
    return Finding(
        "versions",
        "requirements",
        Rating.WARNING,
        "; ".join(unmet),
        "install compatible versions, in a new environment if necessary; pip check lists conflicts",
        {"unmet": unmet},
    )
