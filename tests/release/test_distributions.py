"""The wheel and the source distribution have all files, and the metadata that messages and pages rely on."""

import re
import subprocess
import tarfile
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest

import lockstep

ROOT = Path(__file__).parents[2]
NAME = f"keras_lockstep-{lockstep.__version__}"
BUILT = {"PKG-INFO"}


def own_files() -> set[str]:
    """The files of this checkout that belong to it: those that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {path for path in listed.split("\0") if path and (ROOT / path).exists()}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        return HeaderParser().parsestr(archive.read(f"{NAME}.dist-info/METADATA").decode())


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    own = {path.removeprefix("src/") for path in own_files() if path.startswith("src/")}
    assert packed.pop("lockstep/cli/errors.md") == (ROOT / "docs" / "errors.md").read_bytes()
    assert {name for name in packed if not name.startswith(f"{NAME}.dist-info/")} == own
    assert "lockstep/monitoring/static/page.js" in own
    assert all(packed[path] == (ROOT / "src" / path).read_bytes() for path in own)
    assert packed[f"{NAME}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_source_distribution_has_every_file_of_the_checkout(distributions: Path) -> None:
    with tarfile.open(distributions / f"{NAME}.tar.gz") as archive:
        packed = {member.name.removeprefix(f"{NAME}/") for member in archive if member.isfile()}
    assert packed - BUILT == own_files()


def test_the_wheel_has_this_version(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("keras-lockstep", lockstep.__version__)


def asked_extras() -> Iterator[tuple[str, str]]:
    """Yield each extra that a message, a page or an example asks to install, and where it does so."""
    for path in sorted(own_files()):
        if path.startswith(("src/", "docs/", "examples/", "README.md")) and not path.endswith(".png"):
            for extras in re.findall(
                r"(?:keras-lockstep|dist/\*\.whl\)|'\.)\[([^]]+)\]", (ROOT / path).read_text()
            ):
                for extra in extras.split(","):
                    # A name in braces is filled in at run time.
                    if "{" not in extra:
                        yield extra, path


def test_every_extra_that_is_asked_for_exists(metadata: Message) -> None:
    asked = dict(asked_extras())
    assert {"jax", "tensorflow", "torch", "demo", "hosts", "notebook", "ray"} <= set(asked)
    assert not {
        extra: path for extra, path in asked.items() if extra not in metadata.get_all("Provides-Extra")
    }
