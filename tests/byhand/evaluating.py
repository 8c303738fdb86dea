"""An evaluator without `fit`: it evaluates, predicts and saves by itself.

    evaluating.py FOLDER

FOLDER has checkpoints of examples/evaluator.py.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import lockstep
from evaluator import build_and_compile_model, load_digits

folder = sys.argv[1]
(x, y), held_out = load_digits()
model = build_and_compile_model()
loaded = lockstep.load_checkpoint(model, folder)
# Without a strategy this is plain Keras.
plain = model.evaluate(*held_out, batch_size=64, verbose=0, return_dict=True)

cluster = {"worker": ["localhost:20000", "localhost:20001"]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = build_and_compile_model()
history = lockstep.SidecarEvaluator(model, held_out, folder, max_evaluations=1, batch_size=64).start()
model.save("saved.keras")
print(
    json.dumps(
        {
            "step": loaded.step,
            "plain": {f"val_{name}": [value] for name, value in plain.items()},
            "sidecar": history.history,
            "evaluates alone": model.evaluate(*held_out, batch_size=64, verbose=0, return_dict=True) == plain,
            "predicts alone": model.predict(held_out[0], verbose=0).shape,
            "saves alone": Path("saved.keras").exists(),
            "chief": lockstep.is_chief(),
            "replicas": strategy.num_replicas_in_sync,
        }
    )
)
