import sys
from pathlib import Path

# The harness imports the same modules by their plain names.
sys.path.insert(0, str(Path(__file__).parent))
