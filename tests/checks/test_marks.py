"""`make test-ci` imports only files of tests in which, or in whose `conftest.py`, it finds its mark."""

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_mark_of_a_test_is_in_its_file() -> None:
    marking = [path for path in TESTS.rglob("*.py") if "mark.ci" in path.read_text()]
    others = [path for path in marking if not path.match("test_*.py") and path.name != "conftest.py"]
    assert others == []
    assert len(marking) > 50
