"""The keys of `lockstep top`, and what fits on its screen."""

from dataclasses import replace

import pytest

from lockstep.monitoring.overview import Overview, WorkerRow
from lockstep.monitoring.top_screen import QUIT, TopScreen, read_keys
from lockstep.protocol.admin import Refused, ScaleRequest, StackReply, StackRequest, Status, StopRequest

ROWS = tuple(
    WorkerRow(worker, "box", "training", cause="slow" * (worker == 2), score=0.5) for worker in (0, 2, 5)
)
VIEW = Overview(
    time=1010.0,
    job="train-1",
    script="train.py",
    began=1000.0,
    call="fit 1",
    step=5,
    epoch=1,
    trained=5,
    metrics={},
    examples_per_second=None,
    steps_per_second=None,
    idle=None,
    workers=(*ROWS, WorkerRow(7, "box", "lost", ended=True)),
    wanted=3,
    hosts=(),
    events=("0:01 worker 7 lost: killed",),
)
STATUS = Status("train-1", "train.py", 5, "/r", 1000.0, 4, (0, 2, 5), (), 4, "fit 1")


def press(screen: TopScreen, *keys: str, view: Overview = VIEW) -> object:
    """Press keys; return what the last one asks for."""
    asked: object = None
    for key in keys:
        asked = screen.press(key, view)
    return asked


def last_line(screen: TopScreen) -> str:
    return screen.lines(VIEW, 100, 40)[-1].text


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("q", ["q"]),
        ("w12\r", ["w", "1", "2", "enter"]),
        ("\x1b[A\x1bOB\x1b[B", ["up", "down", "down"]),
        ("\x1b", ["escape"]),
        ("\x7f\n", ["backspace", "enter"]),
        # Keys without a meaning, and letters that terminals send for them, do nothing.
        ("\x1b[3~\x1b[1;5Cq\x1bOP\x00", ["q"]),
    ],
)
def test_keys_are_read(typed: str, keys: list[str]) -> None:
    assert list(read_keys(typed)) == keys


def test_q_quits() -> None:
    assert press(TopScreen(), "q") == QUIT


@pytest.mark.parametrize(
    ("answer", "asked"), [("y", StopRequest()), ("n", None), ("q", None), ("escape", None)]
)
def test_s_stops_after_a_question(answer: str, asked: object) -> None:
    screen = TopScreen()
    assert press(screen, "s") is None
    assert last_line(screen) == "stop train-1 as lockstep stop does? y/n"
    assert press(screen, answer) == asked
    assert "stop train-1" not in last_line(screen)


def test_plus_and_minus_scale_from_the_last_request() -> None:
    screen = TopScreen()
    assert press(screen, "+") == ScaleRequest(4)
    assert press(screen, "+") == ScaleRequest(5)
    assert press(screen, "-") == ScaleRequest(4)
    screen.see(ScaleRequest(4), STATUS)
    assert last_line(screen) == "workers now 3, wanted 4"
    assert press(screen, "+", view=replace(VIEW, wanted=4)) == ScaleRequest(5)
    # After a refusal, what the job has counts.
    screen.see(ScaleRequest(5), Refused("there are 4 replicas"))
    assert last_line(screen) == "there are 4 replicas"
    assert press(screen, "+", view=replace(VIEW, wanted=4)) == ScaleRequest(5)


def test_a_job_keeps_a_worker_and_must_be_known() -> None:
    screen = TopScreen()
    assert press(screen, "-", view=replace(VIEW, wanted=1)) is None
    assert "at least one worker" in last_line(screen)
    assert press(screen, "+", view=replace(VIEW, wanted=None)) is None
    assert "unknown" in last_line(screen)


def test_stacks_are_asked_for_by_number_and_by_arrows() -> None:
    screen = TopScreen()
    assert press(screen, "w", "1", "3", "backspace", "2", "enter") == StackRequest(12)
    assert press(screen, "w", "enter") is None
    assert press(screen, "w", "1", "escape") is None
    assert press(screen, "enter") is None
    assert press(screen, "down", "down", "enter") == StackRequest(2)
    # Those that have ended have no stack.
    assert press(screen, "down", "down", "down", "enter") == StackRequest(5)
    assert press(screen, "up", "up", "up", "enter") == StackRequest(0)


def test_a_stack_is_shown_until_escape() -> None:
    screen = TopScreen()
    frames = (
        'File "/home/me/work/project/train.py", line 12 in load',
        'File "/usr/lib/python3/site-packages/keras/src/trainer.py", line 345 in fit',
    )
    screen.see(StackRequest(2), StackReply(2, frames))
    shown = [line.text for line in screen.lines(VIEW, 100, 40)]
    at = shown.index("worker 2 is here (most recent call first):")
    assert shown[at + 1 : at + 3] == ["  load  work/project/train.py:12", "  fit   keras/src/trainer.py:345"]
    assert VIEW.events[0] not in shown
    press(screen, "escape")
    assert VIEW.events[0] in [line.text for line in screen.lines(VIEW, 100, 40)]
    screen.see(StackRequest(2), StackReply(2, (), "it has not responded within 2 s"))
    assert "worker 2: it has not responded within 2 s" in [line.text for line in screen.lines(VIEW, 100, 40)]


@pytest.mark.parametrize("height", [8, 12, 24])
@pytest.mark.parametrize("selected", [0, 150, 299])
def test_the_selected_worker_is_on_the_screen(height: int, selected: int) -> None:
    rows = tuple(WorkerRow(worker, "box", "training") for worker in range(300))
    screen = TopScreen(selected=selected)
    lines = screen.lines(replace(VIEW, workers=rows), 80, height)
    assert len(lines) <= height
    assert all(len(line.text) <= 80 for line in lines)
    (chosen,) = [line for line in lines if line.style == "reverse"]
    assert chosen.text.split()[0] == str(selected)


def test_slow_and_ended_workers_look_different() -> None:
    styles = {
        line.text.split()[0]: line.style
        for line in TopScreen().lines(VIEW, 100, 40)
        if line.text[:1].isdigit()
    }
    assert (styles["0"], styles["2"], styles["7"]) == ("", "yellow", "dim")


def test_a_long_piece_of_advice_is_shown_whole() -> None:
    advice = ("reading takes 60 % of the time: cache or prefetch the data, or do less work",)
    lines = [
        line for line in TopScreen().lines(replace(VIEW, advice=advice), 50, 40) if line.style == "yellow"
    ]
    assert " ".join(line.text for line in lines if line.text in advice[0]) == advice[0]
    assert all(len(line.text) <= 50 for line in lines)
