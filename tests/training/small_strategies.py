"""Trains under the requested strategy, and prints the results.

small_strategies.py mirrored|workers|one|default|missing
"""

import sys

import keras
import numpy as np

import lockstep
from lockstep.errors import ConfigError

KIND = sys.argv[1]
x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")

if KIND == "default":
    strategy = lockstep.get_strategy()
    context = lockstep.get_replica_context()
    assert context is not None
    assert strategy is context.strategy
    assert not lockstep.has_strategy()
    assert strategy.num_replicas_in_sync == context.num_replicas_in_sync == 1
    assert (context.replica_id_in_sync_group, context.all_reduce("SUM", 3)) == (0, 3)
    with strategy.scope():
        assert lockstep.has_strategy()
        assert lockstep.get_replica_context() is None
        assert strategy.run(lambda a, b: a + b, args=(1,), kwargs={"b": 2}) == 3
    np.testing.assert_allclose(strategy.reduce("MEAN", x, axis=0), x.mean(0), rtol=1e-5)
    assert strategy.experimental_distribute_dataset([x]) == [x]
    assert strategy.distribute_datasets_from_function(lambda context: context.num_input_pipelines) == 1
    assert list(strategy.steps(3, {})) == [0, 1, 2]
    print("default: as without a strategy")
    sys.exit()

if KIND == "missing":
    for name in ("GPU:7", "banana"):
        try:
            with lockstep.OneDeviceStrategy(name).scope():
                print("entered")
        except ConfigError as error:
            print(str(error).partition(":")[0] if name == "banana" else str(error)[:7])
    sys.exit()

made = {
    "mirrored": lambda: lockstep.MirroredStrategy(devices=["CPU:0", "CPU:1"]),
    "workers": lockstep.MultiWorkerMirroredStrategy,
    "one": lambda: lockstep.OneDeviceStrategy("/cpu:0"),
}
with made[KIND]().scope() as strategy:
    assert lockstep.get_strategy() is strategy
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, x[:, :1], batch_size=20, epochs=2, verbose=0)
print("replicas:", strategy.num_replicas_in_sync)
print("digest:", lockstep.digest(model), flush=True)
