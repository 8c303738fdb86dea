"""The file of a report: what it may overwrite, and what its text may contain."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.monitoring.report import build_report, write_report

from .made_runs import HOSTILE, job, make_hostile_run, make_run, metrics, steps


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    text = build_report(make_run(tmp_path / "run")).html
    assert write_report(path, text) == path.stat().st_size
    write_report(path, text)
    path.write_text("<html>another file</html>")
    with pytest.raises(
        ConfigError, match="exists and is not a report; delete it, or give another file with -o"
    ):
        write_report(path, text)
    assert path.read_text() == "<html>another file</html>"
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        write_report(tmp_path / "missing" / "report.html", text)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["report.html", "run"]


def test_the_policy_has_the_hashes_of_what_is_inside(tmp_path: Path) -> None:
    text = build_report(make_run(tmp_path / "run")).html
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "http:" not in re.sub(r"http://www.w3.org", "", text)


def test_texts_of_a_run_cannot_leave_the_data(tmp_path: Path) -> None:
    text = build_report(make_hostile_run(tmp_path / "<!--<script>")).html
    data, rest = text.split('id="report-data">')[1].split("</script>", 1)
    assert not set(data) & set("<>&\u2028\u2029")
    found = json.loads(data)
    assert found["name"] == "<!--<script>"
    assert found["parts"]["summary"]["digest"] == HOSTILE
    assert "attacked" not in rest


def test_the_size_is_bounded(tmp_path: Path) -> None:
    measured = [metrics(at, at, None, **{f"m{one}": at * 1.1 for one in range(20)}) for at in range(1, 1500)]
    measured += [steps(at, worker, at) for worker in range(100) for at in range(2, 30)]
    folder = make_run(tmp_path / "run", [job(workers=100)], measured, log="x" * 80 + "\n" * 3_000_000)
    assert len(build_report(folder).html) < 6_000_000
