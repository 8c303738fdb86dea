"""docs/start.md begins with the program of the README, and two workers have the digest of one."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start.md").read_text()
PROGRAM = re.compile(r"^```python\n(import keras\n.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_program_is_that_of_the_readme() -> None:
    assert PROGRAM.findall(PAGE)[0] == PROGRAM.findall((ROOT / "README.md").read_text())[0]


def test_the_digests_are_pairs() -> None:
    first, second, third, fourth = re.findall(r"digest (\w{64})", PAGE)
    assert first == second != third == fourth
