"""Hosts of one job that share a folder use it together; another job is refused."""

import os
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.system import run_folder
from lockstep.system.run_folder import claim_folder, claim_for_job, remove_unused_claim, sign_claim


def test_hosts_of_one_job_share_a_folder(tmp_path: Path) -> None:
    own = claim_folder(tmp_path)
    sign_claim(tmp_path, "one")
    assert claim_for_job(tmp_path, "one", "the folder", "--checkpoint") is None
    os.close(own)
    first = claim_for_job(tmp_path, "two", "the folder", "--checkpoint")
    assert first is not None
    assert claim_for_job(tmp_path, "two", "the folder", "--checkpoint") is None
    os.close(first)


def test_another_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_SIGNS_WITHIN", 0.0)
    own = claim_for_job(tmp_path, "one", "the folder", "--checkpoint")
    assert own is not None
    with pytest.raises(ConfigError, match=r"another run uses .*give another --checkpoint"):
        claim_for_job(tmp_path, "two", "the folder", "--checkpoint")
    os.close(own)


def test_only_an_unused_folder_is_removed(tmp_path: Path) -> None:
    for name, used in (("a", False), ("b", True)):
        folder = tmp_path / name
        own = claim_for_job(folder, "one", "the folder", "--checkpoint")
        assert own is not None
        if used:
            (folder / "step-000000000001").mkdir()
        remove_unused_claim(folder)
        os.close(own)
        assert folder.exists() is used
