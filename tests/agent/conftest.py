"""The path of the fake launcher, which these tests share with those of the launcher."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launcher"))
