"""Whether versions fit, judged from given metadata and from those of this installation."""

from pathlib import Path
from unittest.mock import patch

import pytest

from lockstep.doctor.check import Finding, Rating, Sources, judge, worst
from lockstep.doctor.checkup import CHECKS
from lockstep.doctor.versions import LOCKSTEP, Packages, look_at_installation
from lockstep.launcher.backend import Wishes

NEEDS = (
    *("keras>=3.12", 'jax>=0.7; extra == "jax"', "numpy>=1.26"),
    # Those of another extra do not count.
    *('torch==2.13.0; extra == "bench"', 'torch>=2.6; extra == "torch"'),
)
VERSIONS = {LOCKSTEP: "0.1", "keras": "3.15.1", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.3"}
REQUIREMENTS = {LOCKSTEP: NEEDS, "jax": ("jaxlib<=0.10.2,>=0.10.2",), "keras": ("numpy",)}
NOTHING = Wishes()


def examine(
    versions: dict[str, str] = VERSIONS, wishes: Wishes = NOTHING, installed: tuple[str, ...] = ("jax",)
) -> tuple[dict[str, Finding], str | None]:
    return judged(Packages(versions, REQUIREMENTS), wishes, *installed)


def judged(packages: Packages, wishes: Wishes, *installed: str) -> tuple[dict[str, Finding], str | None]:
    sources = Sources(wishes=wishes, is_importable=lambda name: name in installed)
    with patch.object(Packages, "installed", return_value=packages):
        installation = look_at_installation(sources)
    findings = judge("versions", CHECKS["versions"], {look_at_installation: installation})
    return {finding.name: finding for finding in findings}, installation.chosen


def test_compatible_versions_are_fine() -> None:
    findings, chosen = examine()
    assert chosen == "jax"
    assert worst(findings.values()) == Rating.FINE
    assert findings["Keras"].facts == {"version": "3.15.1"}
    assert findings["jax"].facts == {"installed": True, "chosen": True, "version": "0.10.2"}
    assert findings["torch"].reason == "not installed"


def test_unreadable_metadata_is_a_warning() -> None:
    packages = Packages(VERSIONS, {**REQUIREMENTS, "jax": ("foo (>=x broken",)})
    findings, chosen = judged(packages, NOTHING, "jax")
    assert chosen == "jax"
    assert findings["requirements"].rating == Rating.WARNING
    assert "jax 0.10.2 cannot be checked" in findings["requirements"].reason


def test_an_interrupted_installation_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "~eras-3.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "keras" in Packages.installed().versions


def test_an_old_keras_is_a_failure_with_a_remedy() -> None:
    findings, _ = examine({**VERSIONS, "keras": "3.11.3"})
    assert findings["Keras"].rating == Rating.FAILURE
    assert findings["Keras"].reason == "3.11.3, but Lockstep needs keras>=3.12"
    assert findings["Keras"].remedy == "pip install 'keras>=3.12'"


def test_a_missing_keras_is_a_failure() -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != "keras"}
    assert examine(versions)[0]["Keras"].rating == Rating.FAILURE


@pytest.mark.parametrize(("variable", "rating"), [("torch", Rating.FAILURE), ("jax", Rating.WARNING)])
def test_an_old_backend_is_a_failure_only_if_it_is_chosen(variable: str, rating: Rating) -> None:
    findings, chosen = examine({**VERSIONS, "torch": "2.1.0"}, Wishes(variable=variable), ("jax", "torch"))
    assert chosen == variable
    assert findings["torch"].rating == rating
    assert "needs torch>=2.6" in findings["torch"].reason


@pytest.mark.parametrize("variable", ["tensorflow", "theano"])
def test_an_unavailable_backend_is_a_failure(variable: str) -> None:
    findings, chosen = examine(wishes=Wishes(variable=variable))
    assert chosen is None
    assert findings["chosen backend"].rating == Rating.FAILURE
    assert f"KERAS_BACKEND={variable}" in findings["chosen backend"].reason


@pytest.mark.parametrize("variable", [None, "jax"])
def test_without_a_backend_the_remedy_is_to_install_one(variable: str | None) -> None:
    finding = examine(VERSIONS, Wishes(variable=variable), ())[0]["chosen backend"]
    assert finding.reason.startswith("no Keras backend is installed for ")
    assert finding.remedy.startswith("install one: pip install 'keras-lockstep[jax]'")


def test_the_reason_for_the_backend_is_named() -> None:
    both = ("jax", "torch")
    versions = {**VERSIONS, "torch": "2.13.0"}
    assert (
        "KERAS_BACKEND selects it"
        in examine(versions, Wishes(variable="torch", configured="jax"), both)[0]["chosen backend"].reason
    )
    assert (
        "keras.json selects it"
        in examine(versions, Wishes(configured="torch"), both)[0]["chosen backend"].reason
    )
    text = examine(versions, Wishes(configured="tensorflow"), both)[0]["chosen backend"].reason
    assert text.startswith("jax, because it is the first installed of TensorFlow, JAX and PyTorch")


def test_unmet_requirements_are_named() -> None:
    findings, _ = examine({**VERSIONS, "jaxlib": "0.9.0"})
    assert findings["requirements"].rating == Rating.WARNING
    assert findings["requirements"].facts["unmet"] == ["jax 0.10.2 needs jaxlib<=0.10.2,>=0.10.2, not 0.9.0"]


def test_tensorflow_cpu_provides_tensorflow() -> None:
    findings, _ = examine({**VERSIONS, "tensorflow-cpu": "2.21.0"}, installed=("jax", "tensorflow"))
    assert findings["tensorflow"].reason == "2.21.0, by tensorflow-cpu"


def test_this_installation_can_be_read() -> None:
    packages = Packages.installed()
    assert packages.versions.keys() >= {"keras", "numpy", LOCKSTEP}
    lowest = packages.lowest("keras")
    assert lowest is not None
    assert str(lowest.specifier) == ">=3.12"
    assert not list(packages.unmet([LOCKSTEP]))
