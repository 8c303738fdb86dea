"""The modules that these tests share, with each other and with the processes that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
