"""Runs the sessions of docs/gallery.md; writes their output into the page, and draws the curves.

python docs/site/gallery.py [ENTRY ...]

An entry is a section of the page, by the anchor of its heading; without one, all are run. The commands of
its `console` block run in a copy of examples/, and the block becomes what they print. The curves come from
the run folders that the session leaves, and from lines such as `step 10: loss 0.5, accuracy 0.9`.
docs/gallery.json keeps the points of the curves, and hashes of the programs and of the session, by which a
test notices when these no longer belong together.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
RECORDS = ROOT / "docs" / "gallery.json"
PICTURES = ROOT / "docs" / "images" / "gallery"
EXAMPLES = ROOT / "examples"
# What stands in the page for the folder of the session.
FOLDER = "/home/me/examples"
# Seconds after which a session is ended.
LIMIT = "900"

HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
SESSION = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Messages of TensorFlow when it is imported, and of Lockstep about a slow start.
OMITTED = re.compile(
    r"WARNING: All log messages before absl|[IWE]\d{4} \d\d:\d\d|[IWE]0000 00:00:|"
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] |To enable the following instructions|"
    r"lockstep: (?:no step completed after|before the first step)"
)
REPORTED = re.compile(r"^(?:\[worker 0\] )?(step|epoch) (\d+): (\w+ -?\d.*)$", re.MULTILINE)
FIGURE = re.compile(r"(\w+) (-?\d+\.\d+)")

NAMES = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}

# A panel of a picture: by the label of a line, its points; None interrupts the line.
Panel = dict[str, list[list[float] | None]]


def entries(text: str) -> dict[str, str]:
    """Return the sections of the page that have a session, by anchor."""
    parts = HEADING.split(text)[1:]
    found = zip(parts[::2], parts[1::2], strict=True)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): section
        for title, section in found
        if SESSION.search(section)
    }


def session_of(section: str) -> str:
    """Return the text of the session: commands after `$ `, and their output."""
    (found,) = SESSION.findall(section)
    return str(found)


def commands_of(session: str) -> list[str]:
    """Return the commands of a session."""
    return [line[2:] for line in session.splitlines() if line.startswith("$ ")]


def programs_of(section: str) -> dict[str, str]:
    """Return the SHA-256 of each program that the section links to, and of the examples that it imports."""
    names = re.findall(r"\]\(\.\./examples/([\w/]+\.py)\)", section)
    hashes: dict[str, str] = {}
    while names:
        file = EXAMPLES / names.pop(0)
        if file.name in hashes:
            continue
        text = file.read_text()
        hashes[file.name] = hashlib.sha256(text.encode()).hexdigest()
        imported = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
        names += [f"{name}.py" for name in imported if (EXAMPLES / f"{name}.py").exists()]
    return hashes


def digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def play(commands: list[str], folder: Path) -> str:
    """Run the commands in one shell in `folder`; return the session."""
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    lines = [f"printf '%s\\n' {shlex.quote('$ ' + one)}\n{one}" for one in commands]
    script = "\n".join(["set -o pipefail", *lines, "wait"])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["timeout", "--kill-after=10", LIMIT, "bash", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text = result.stdout.replace(str(folder.resolve()), FOLDER)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if not OMITTED.match(line))


def read(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of a run folder; none if it is absent."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_folders(folder: Path) -> list[tuple[str, Path]]:
    """Return the backend and the run folder of the first run of each script."""
    first: dict[str, tuple[str, Path]] = {}
    folders = [file.parent for file in (folder / "runs").glob("*/events.jsonl")]
    for run in sorted(folders, key=lambda one: read(one / "events.jsonl")[0]["time"]):
        job = read(run / "events.jsonl")[0]
        first.setdefault(job["script"]["path"], (job["backend"], run))
    return list(first.values())


def add(panels: dict[str, Panel], name: str, prefix: str, point: list[float] | None) -> None:
    """Add a point of the metric `name`."""
    kind = "validation" if name.startswith("val_") else "training"
    lines = panels.setdefault(name.removeprefix("val_"), {})
    lines.setdefault(prefix or kind, []).append(point)


def curves(folder: Path, session: str) -> dict[str, Any]:
    """Return the panels of the picture of a session, and the name of the horizontal axis."""
    panels: dict[str, Panel] = {}
    runs = run_folders(folder)
    axis = "training step"
    for backend, run in runs:
        prefix = NAMES[backend] if len(runs) > 1 else ""
        metrics = [
            one for one in read(run / "measurements.jsonl") if one["event"] == "metrics" and one["epoch"]
        ]
        last = ""
        for one in metrics:
            for name, value in one["values"].items():
                if value is None or (prefix and name.startswith("val_")):
                    continue
                if last and one["call"] != last:
                    add(panels, name, prefix, None)
                add(panels, name, prefix, [one["trained"], float(f"{value:.5g}")])
            last = one["call"]
        if not metrics:
            axis = add_reported(panels, prefix, (run / "worker-0.log").read_text()) or axis
        workers = sizes(run)
        if len({number for _, number in workers}) > 1:
            panels["workers"] = {"": workers}
    if not any("validation" in lines for lines in panels.values()):
        add_reported(panels, "", "\n".join(re.findall(r"^step \d+: val_.*$", session, re.MULTILINE)))
    return {"axis": axis, "panels": panels}


def add_reported(panels: dict[str, Panel], prefix: str, text: str) -> str:
    """Add the figures that a script prints; return what it counts."""
    found = REPORTED.findall(text)
    for _, number, figures in found:
        for name, value in FIGURE.findall(figures):
            add(panels, name, prefix, [int(number), float(value)])
    return str(found[0][0]) if found else ""


def sizes(run: Path) -> list[list[float]]:
    """Return the number of workers by training step, as the corners of a line."""
    measured = [one for one in read(run / "measurements.jsonl") if "trained" in one]
    corners: list[list[float]] = []
    for view in (one for one in read(run / "events.jsonl") if one["event"] == "view"):
        before = [one["trained"] for one in measured if one["time"] <= view["time"]]
        step, number = max(before, default=0), len(view["workers"])
        if corners:
            corners.append([step, corners[-1][1]])
        corners.append([step, number])
    end = max((one["trained"] for one in measured), default=0)
    return [*corners, [end, corners[-1][1]]] if corners else []


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 380, 240, 52, 34, 16, 40
COLORS = ("#0969da", "#cf222e", "#1a7f37", "#8250df")


def ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers between two numbers."""
    size = 10.0 ** len(str(int((high - low) * 1e6))) / 1e6
    step = next(
        step
        for step in sorted(size / 10**power * factor for power in range(3) for factor in (1, 2, 5))
        if (high - low) / step <= 5
    )
    return [round(number * step, 6) for number in range(int(low // step), int(high // step) + 2)]


def draw(picture: dict[str, Any], alternative: str) -> str:
    """Return the picture of curves, as SVG: a panel for each metric."""
    panels: dict[str, Panel] = picture["panels"]
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{alternative}">',
        f'<rect width="{width}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        '<g font-family="system-ui, sans-serif" font-size="11" fill="#57606a">',
    ]
    for number, (name, lines) in enumerate(panels.items()):
        parts += draw_panel(number * WIDTH, name, lines, picture["axis"])
    return "\n".join([*parts, "</g></svg>", ""])


def draw_panel(left: int, name: str, lines: Panel, axis: str) -> list[str]:
    """Return the elements of a panel whose left edge is at `left`."""
    points = [point for line in lines.values() for point in line if point]
    x_low, x_high = 0.0, max(point[0] for point in points)
    low, high = min(point[1] for point in points), max(point[1] for point in points)
    if name == "workers":
        low = 0.0
    marks = [mark for mark in ticks(low, high or 1.0) if mark == int(mark) or name != "workers"]
    low, high = marks[0], marks[-1]
    inner, depth = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(point: list[float]) -> tuple[float, float]:
        return (
            round(left + LEFT + (point[0] - x_low) / (x_high - x_low) * inner, 1),
            round(TOP + (high - point[1]) / (high - low) * depth, 1),
        )

    parts = [f'<text x="{left + LEFT}" y="20" font-size="13" font-weight="600" fill="#1f2328">{name}</text>']
    for mark in marks:
        _, y = place([0, mark])
        parts.append(f'<path d="M{left + LEFT} {y}h{inner}" stroke="#d0d7de" fill="none"/>')
        parts.append(f'<text x="{left + LEFT - 6}" y="{y + 4}" text-anchor="end">{mark:g}</text>')
    for mark in (mark for mark in ticks(x_low, x_high) if mark <= x_high):
        x, y = place([mark, low])
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{mark:g}</text>')
    parts.append(f'<text x="{left + LEFT + inner}" y="{HEIGHT - 8}" text-anchor="end">{axis}</text>')
    for number, (label, line) in enumerate(lines.items()):
        color = COLORS[1] if label == "validation" else COLORS[number % len(COLORS)]
        path, pen = "", "M"
        for point in line:
            path += f"{pen}{place(point)[0]} {place(point)[1]}" if point else ""
            pen = "L" if point else "M"
        parts.append(f'<path d="{path}" stroke="{color}" stroke-width="1.8" fill="none"/>')
        alone = [
            two
            for one, two, three in zip([None, *line], line, [*line[1:], None], strict=False)
            if two and not one and not three
        ]
        parts += [
            f'<circle cx="{place(one)[0]}" cy="{place(one)[1]}" r="2.5" fill="{color}"/>' for one in alone
        ]
        x = left + LEFT + inner - 76 * (len(lines) - number) + 70
        parts.append(f'<text x="{x}" y="20" text-anchor="end" fill="{color}">{label}</text>')
    return parts


def renew(entry: str) -> None:
    """Run an entry, and store what it gives."""
    section = entries(PAGE.read_text())[entry]
    programs = programs_of(section)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "examples"
        session = play(commands_of(session_of(section)), folder)
        found = curves(folder, session)
    text = PAGE.read_text()
    PAGE.write_text(text.replace(session_of(section), session))
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    records[entry] = {"programs": programs, "session": digest(session), "curves": found}
    ordered = {name: records[name] for name in entries(text) if name in records}
    RECORDS.write_text(json.dumps(ordered, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"{entry}.svg").write_text(draw(found, f"Curves of the example: {entry}"))


def main() -> None:
    """Run the entries that the command names, or all."""
    for entry in sys.argv[1:] or list(entries(PAGE.read_text())):
        print(f"{entry} ...", flush=True)
        renew(entry)


if __name__ == "__main__":
    main()
