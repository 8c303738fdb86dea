"""The launcher without processes, which the tests of the launcher's contract share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launcher"))
