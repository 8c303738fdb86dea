"""A run in one HTML file: the page with its script, its style and the data of the run inside."""

import base64
import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.errors import ConfigError
from lockstep.monitoring import page_data
from lockstep.monitoring.page_data import Window
from lockstep.monitoring.page_server import STATIC
from lockstep.monitoring.run_catalog import is_active
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.run_logs import log_sizes, read_page
from lockstep.system.files import open_regular
from lockstep.version import __version__

_MARK = b'<meta name="generator" content="lockstep report '
_BUDGET = 60_000
"""Points of all charts together, roughly."""
_MOST_CHARTS = 200
_MOST_WORKERS = 64
_LOG_BUDGET = 1024 * 1024
_LEAST_LOG = 4096
_STYLE = '<link rel="stylesheet" href="page.css">'
_SCRIPT = '<script src="page.js"></script>'
_CHARSET = '<meta charset="utf-8">'
_HARMLESS = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)
"""In JSON, these stand in texts only, where their escapes mean the same; HTML sees no tag and no comment."""


class Report(NamedTuple):
    """The report of a run: its HTML, and how the run went in a few words."""

    html: str
    headline: str


def build_report(folder: Path) -> Report:
    """Return the report of a run.

    Its size is bounded: charts have fewer points for a long run, and logs have only their ends.

    Raises:
        OSError: a file of the run cannot be read.
    """
    run = RunFolder(folder)
    run.update()
    data = _data(folder, run)
    text = msgspec.json.encode(data).decode().translate(_HARMLESS)
    style, script = (STATIC / "page.css").read_text(), (STATIC / "page.js").read_text()
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = (STATIC / "index.html").read_text()
    head = (
        f'{_CHARSET}\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'{_MARK.decode()}{__version__}">'
    )
    for old, new in (
        (_CHARSET, head),
        (_STYLE, f"<style>{style}</style>"),
        (
            _SCRIPT,
            f'<script type="application/json" id="report-data">{text}</script>\n<script>{script}</script>',
        ),
    ):
        before, mark, after = page.partition(old)
        assert mark, old
        page = before + new + after
    return Report(page, data["parts"]["summary"]["headline"])


def write_report(path: Path, text: str) -> int:
    """Write a report as a whole, and return its size in bytes.

    Raises:
        ConfigError: the file exists and is not a report, or cannot be written.
    """
    content = text.encode()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if os.path.lexists(path) and not _is_report(path):
            raise ConfigError(f"{path} exists and is not a report; delete it, or give another file with -o")
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another file with -o") from None
    return len(content)


def _is_report(path: Path) -> bool:
    with os.fdopen(open_regular(path), "rb") as file:
        return _MARK in file.read(4096)


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _data(folder: Path, run: RunFolder) -> dict[str, Any]:
    parts = page_data.parts(run.state, active=is_active(folder))
    shown = [chart for chart in parts["charts"] if chart["section"] == "parts"][:_MOST_WORKERS]
    others = [chart for chart in parts["charts"] if chart["section"] != "parts"][:_MOST_CHARTS]
    parts["charts"] = [*others, *shown]
    names = [chart["id"] for chart in parts["charts"]]
    series = sum(len(page_data.chart(run.state, name, Window(points=1))) for name in names)
    points = max(50, min(1000, _BUDGET // max(1, series)))
    charts = {}
    for chart in parts["charts"]:
        axes = ("step", "time") if chart["section"] == "metrics" else ("time",)
        charts[chart["id"]] = {
            axis: page_data.chart(run.state, chart["id"], Window(axis=axis, points=points)) for axis in axes
        }
    return {"name": folder.name, "parts": parts, "charts": charts, "logs": _logs(folder)}


def _logs(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the ends of the logs of the first workers."""
    workers = list(log_sizes(folder))[:_MOST_WORKERS]
    least = max(_LEAST_LOG, _LOG_BUDGET // max(1, len(workers)))
    logs = {}
    for worker in workers:
        page = read_page(folder, worker)
        text = page.text[-least:]
        logs[worker] = {"text": text, "start": page.stop - len(text.encode()), "size": page.size}
    return logs
