"""Planted faults are found at the right step, with the right cause; what changes no bit is no difference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_server import CommandServers

PLANTING = Path(__file__).with_name("planting.py")
PATIENCE = 3600.0


@pytest.fixture
def planted(
    commands: CommandServers,
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
    keeps_code: dict[str, str],
    tmp_path: Path,
) -> Callable[..., list[dict[str, Any]]]:
    """Run the script with the plants; return a result per plant."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        variables = environment | lean(PLANTING, "jax") | keeps_code | {"KERAS_BACKEND": "jax"}
        command = [str(PLANTING), str(tmp_path), *arguments]
        result = commands.run(command, variables, PATIENCE, ("keras", "jax"))
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return run


@pytest.mark.ci
def test_some_planted_faults(planted: Callable[..., list[dict[str, Any]]]) -> None:
    found = planted("quick")
    assert len(found) == 5
    assert [[each["step"], each["cause"]] for each in found] == [each["wanted"] for each in found]


@pytest.mark.slow
def test_more_than_100_planted_faults(planted: Callable[..., list[dict[str, Any]]]) -> None:
    found = planted()
    faults = [each for each in found if each["wanted"][0] is not None]
    assert len(faults) >= 100
    assert [each for each in found if each["step"] != each["wanted"][0]] == []
    wrong = [(each["plant"], each["cause"]) for each in faults if each["cause"] != each["wanted"][1]]
    assert len(wrong) <= 0.05 * len(faults), wrong
