"""The report as a table and as JSON."""

import io
import json

from rich.console import Console

from lockstep.doctor import report
from lockstep.doctor.check import Finding, Rating

FINE = Finding(Rating.FINE, "3.15.1", "", {"version": "3.15.1"}, name="Keras", section="versions")
WARNING = Finding(
    Rating.WARNING, "is left over [here]", "unset TF_CONFIG", name="TF_CONFIG", section="environment"
)
FAILURE = Finding(
    Rating.FAILURE, "it exited with status 1", "look above", name="2 workers on jax", section="training"
)


def shown(*findings: Finding) -> str:
    out = io.StringIO()
    report.show(findings, Console(file=out, width=100, highlight=False))
    return out.getvalue()


def test_a_row_has_the_rating_the_reason_and_the_remedy() -> None:
    lines = [line.split() for line in shown(FINE, WARNING).splitlines()]
    assert ["ok", "Keras", "3.15.1"] in lines
    # Brackets are not markup.
    assert ["warn", "TF_CONFIG", "is", "left", "over", "[here]"] in lines
    assert ["->", "unset", "TF_CONFIG"] in lines


def test_the_last_line_is_a_summary() -> None:
    assert shown(FINE).splitlines()[-1] == "this machine is ready"
    assert shown(FINE, WARNING).splitlines()[-1] == "jobs work here: 1 warning"
    assert (
        shown(FAILURE, WARNING, WARNING).splitlines()[-1]
        == "jobs will not work here: 1 failure and 2 warnings"
    )


def test_json_has_the_exit_status_and_all_rows() -> None:
    read = json.loads(report.as_json([FINE, WARNING]))
    assert read["status"] == 1
    assert read["findings"][0] == {
        "section": "versions",
        "name": "Keras",
        "verdict": "fine",
        "reason": "3.15.1",
        "remedy": "",
        "facts": {"version": "3.15.1"},
    }


def test_control_characters_are_not_shown() -> None:
    assert "\x1b" not in shown(
        Finding(Rating.FAILURE, "\x1b]0;x\x07", "\x1b[2J", name="jax\x1b[31m", section="backends")
    )


def test_a_narrow_terminal_shows_the_reasons() -> None:
    out = io.StringIO()
    report.show([WARNING], Console(file=out, width=40, highlight=False))
    text = "".join(out.getvalue().split())
    assert "TF_CONFIG" in text
    assert "isleftover[here]" in text
    assert "->unsetTF_CONFIG" in text
