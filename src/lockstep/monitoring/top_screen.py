"""The screen of `lockstep top` on a terminal, and the effect of its keys. Pure."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lockstep.monitoring.overview import Overview
from lockstep.monitoring.top_text import clipped, heading, host_lines, table
from lockstep.protocol.admin import (
    AdminRequest,
    Refused,
    Reply,
    ScaleRequest,
    StackReply,
    StackRequest,
    StopRequest,
)
from lockstep.system.prose import printable

QUIT: Literal["quit"] = "quit"

_HELP = "q quit  s stop  + - scale  w NUMBER, or arrows and Enter: a worker's stack"
_LEAST_ROWS = 3
_MOST_LINES = 3
"""The most lines of a message."""
_MOST_DIGITS = 6
_LAST_PARTS = 3
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')

Style = Literal["", "bold", "dim", "reverse", "yellow"]


class Line(NamedTuple):
    """A line of the screen, and how it looks."""

    text: str
    style: Style = ""


@dataclass
class TopScreen:
    """The state of the screen.

    Attributes:
        selected: the worker that the arrow keys have selected; None before their first use.
        mode: the meaning of the next key.
        typed: the digits of the number of a worker.
        message: the last line.
        stack: the text that is shown instead of the events.
    """

    selected: int | None = None
    mode: Literal["table", "stop", "number"] = "table"
    typed: str = ""
    message: str = ""
    stack: tuple[str, ...] = ()
    _wanted: int | None = field(default=None)

    def press(self, key: str, view: Overview) -> AdminRequest | Literal["quit"] | None:
        """Process a key; return a request to the job, `QUIT`, or None.

        Args:
            key: a character, or `up`, `down`, `enter`, `escape`, `backspace`.
            view: the overview that is shown.
        """
        self.message = ""
        if self.mode == "stop":
            self.mode = "table"
            return StopRequest() if key in ("y", "Y") else None
        if self.mode == "number":
            return self._press_in_number(key)
        match key:
            case "q":
                return QUIT
            case "s":
                self.mode = "stop"
            case "w":
                self.mode, self.typed = "number", ""
            case "+" | "-":
                return self._scale(1 if key == "+" else -1, view)
            case "up" | "down":
                self._move(1 if key == "down" else -1, view)
            case "enter" if self.selected is not None:
                return self._ask_for_stack(self.selected)
            case "escape":
                self.stack, self.selected = (), None
        return None

    def see(self, request: AdminRequest, reply: Reply | str) -> None:
        """Process the reply to a request, or the reason for a missing reply."""
        if isinstance(request, ScaleRequest) and request.workers == self._wanted:
            self._wanted = None
        if isinstance(reply, str):
            self.message = reply
        elif isinstance(reply, Refused):
            self.message = reply.reason
        elif isinstance(reply, StackReply):
            self.message = ""
            self.stack = stack_lines(reply)
        elif isinstance(request, StopRequest):
            self.message = f"stopping {reply.job}"
        elif isinstance(request, ScaleRequest):
            self.message = f"workers now {len(reply.workers)}, wanted {reply.wanted}"

    def lines(self, view: Overview, width: int, height: int) -> list[Line]:
        """Return at most `height` lines of at most `width` characters."""
        top = [Line(text, "bold" if at == 0 else "") for at, text in enumerate(heading(view))]
        if view.silent_since is not None:
            top[-1] = Line(top[-1].text, "yellow")
        below = [line for text in view.advice for line in _wrapped(text, width, "yellow")]
        below += [Line(text, "dim") for text in host_lines(view)]
        last = self.stack or view.events
        below += [Line(""), *(Line(printable(text), "" if self.stack else "dim") for text in last)]
        prompt = self._prompt(view, width)
        heads, *rows = table(view, width)
        room = max(_LEAST_ROWS, height - len(top) - len(below) - 2 - len(prompt))
        first = self._first_row(view, len(rows), room)
        shown = [*top, Line(""), Line(heads, "dim")]
        for at, text in enumerate(rows[first : first + room], first):
            row = view.workers[at]
            style: Style = "yellow" if row.cause else "dim" if row.ended else ""
            shown.append(Line(text, "reverse" if row.worker == self.selected else style))
        shown += below
        return [
            Line(clipped(line.text, width), line.style) for line in [*shown[: height - len(prompt)], *prompt]
        ]

    def _first_row(self, view: Overview, rows: int, room: int) -> int:
        """Return the first visible row, so that the selected one is visible."""
        at = next((at for at, row in enumerate(view.workers) if row.worker == self.selected), 0)
        return max(0, min(at - room // 2, rows - room))

    def _prompt(self, view: Overview, width: int) -> list[Line]:
        if self.mode == "stop":
            return _wrapped(f"stop {view.job} as lockstep stop does? y/n", width)
        if self.mode == "number":
            return [Line(f"stack of worker: {self.typed}_ (Enter, or Escape to cancel)", "bold")]
        if self.message:
            return _wrapped(self.message, width)
        return [Line("Escape closes the stack; " + _HELP if self.stack else _HELP, "dim")]

    def _press_in_number(self, key: str) -> AdminRequest | None:
        if key.isdigit() and key.isascii():
            self.typed = (self.typed + key)[:_MOST_DIGITS]
        elif key == "backspace":
            self.typed = self.typed[:-1]
        elif key == "enter":
            self.mode = "table"
            if self.typed:
                return self._ask_for_stack(int(self.typed))
        else:
            self.mode = "table"
        return None

    def _ask_for_stack(self, worker: int) -> StackRequest:
        self.message = f"asking worker {worker} for its stack"
        return StackRequest(worker)

    def _scale(self, by: int, view: Overview) -> ScaleRequest | None:
        """Scale from the last requested number, which the overview may not have yet."""
        wanted = self._wanted if self._wanted is not None else view.wanted
        if wanted is None:
            self.message = "the coordinator has not answered yet, so the number of workers is unknown"
            return None
        if wanted + by < 1:
            self.message = "a job has at least one worker; press s to stop it"
            return None
        self._wanted = wanted + by
        self.message = f"asking for {self._wanted} workers"
        return ScaleRequest(self._wanted)

    def _move(self, by: int, view: Overview) -> None:
        workers = [row.worker for row in view.workers if not row.ended]
        if not workers:
            return
        if self.selected not in workers:
            self.selected = workers[0 if by > 0 else -1]
        else:
            at = workers.index(self.selected) + by
            self.selected = workers[max(0, min(at, len(workers) - 1))]


def _wrapped(text: str, width: int, style: Style = "bold") -> list[Line]:
    lines = textwrap.wrap(printable(text), width, max_lines=_MOST_LINES, placeholder=" …")
    return [Line(line, style) for line in lines]


def stack_lines(reply: StackReply) -> tuple[str, ...]:
    """Return the stack of a worker as lines, the innermost frame first, or why there is none."""
    if reply.problem:
        return (f"worker {reply.worker}: {reply.problem}",)
    frames = [_frame(text) for text in reply.frames]
    width = max((len(function) for function, _ in frames), default=0)
    shown = (f"  {function.ljust(width)}  {place}" for function, place in frames)
    return (f"worker {reply.worker} is here (most recent call first):", *shown)


def _frame(text: str) -> tuple[str, str]:
    """Return the function and the place of a frame, whose path starts at the package or the last folders."""
    if (match := _FRAME.fullmatch(text)) is None:
        return text, ""
    path, line, function = match.groups()
    packaged = path.rpartition("-packages/")[2]
    short = packaged if packaged != path else "/".join(path.split("/")[-_LAST_PARTS:])
    return function, f"{short}:{line}"


_KEYS = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "\x7f": "backspace",
    "\b": "backspace",
}


def read_keys(typed: str) -> Sequence[str]:
    """Return the keys in the characters of a terminal; keys without a meaning are omitted."""
    keys, at = [], 0
    while at < len(typed):
        sequence = typed[at : at + 3]
        if sequence in _KEYS:
            keys.append(_KEYS[sequence])
            at += 3
        elif typed[at : at + 2] in ("\x1b[", "\x1bO"):
            at += 2
            # These are parameters, then a letter or a tilde.
            while at < len(typed) and not (typed[at].isalpha() or typed[at] == "~"):
                at += 1
            at += 1
        else:
            sign = typed[at]
            if sign in _KEYS or sign.isprintable():
                keys.append(_KEYS.get(sign, sign))
            at += 1
    return keys
