"""The custom loop of the examples; the chief kills itself once, after its first checkpoint.

killed_chief.py FOLDER
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = Path(sys.argv[1])
save = tf.train.CheckpointManager.save


def save_and_kill(manager: Any, *args: Any, **kwargs: Any) -> Any:
    begun = FOLDER.exists() and any(FOLDER.glob("ckpt-*.index"))
    saved = save(manager, *args, **kwargs)
    if manager.directory == str(FOLDER) and not begun:
        os.kill(os.getpid(), signal.SIGKILL)
    return saved


tf.train.CheckpointManager.save = save_and_kill
sys.path.insert(0, str(EXAMPLES))
runpy.run_path(str(EXAMPLES / "custom_loop_tensorflow.py"), run_name="__main__")
