"""Trains with `fit`, from arrays and from datasets, and with a custom loop; prints digests.

Lies in one folder with `program` and `custom_loops`.
"""

import sys

import custom_loops
import program

import lockstep

sys.argv[1:] = ["cnn", "dataset"]
program.main()
strategy = lockstep.MultiWorkerMirroredStrategy()
custom_loops.strategy, custom_loops.context = strategy, custom_loops.Context(strategy)
custom_loops.main(["full"])
