"""The faults of `make mutants` still apply to the sources."""

import re
import runpy
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tests" / "mutants" / "mutants.py"))


def test_each_fault_replaces_lines_that_occur_once() -> None:
    faults = MUTANTS["read_faults"]()
    for fault in faults:
        assert fault.planted_in((ROOT / fault.file).read_text()), fault.name
    assert [name for name, times in Counter(fault.name for fault in faults).items() if times > 1] == []


def test_there_are_faults_of_all_rooms_with_tests_that_exist() -> None:
    faults = MUTANTS["read_faults"]()
    assert len(faults) >= 60
    assert sum(bool(fault.fix) for fault in faults) >= 50
    rooms = {path.name for path in (ROOT / "src" / "lockstep").iterdir() if (path / "__init__.py").exists()}
    assert {fault.room for fault in faults} >= rooms
    for fault in faults:
        for test in fault.tests:
            file, _, name = test.partition("::")
            function = f"\\bdef {name.partition('[')[0]}\\(" if name else ""
            assert re.search(function, (ROOT / file).read_text()), (fault.name, test)
