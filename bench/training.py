"""A model trained by two workers: Lockstep on a backend against the backend's own strategies.

    training.py [jax | tensorflow | torch] [MODEL] [--further] [--nightly FOLDER] [--turns N] [--steps N]

The peers are the strategies of the backend for two processes. Other rows show the same computation without an
exchange, which is the ceiling of a program; one process on the cores of two workers; and one worker of
Lockstep against plain Keras. With `--further`, the peers are instead PyTorch's DistributedDataParallel with a
PyTorch model, and the fastest single process, with the tutorial's CNN. With `--nightly`, they are
DistributedDataParallel, and Keras's own strategy on PyTorch, which Keras has from 3.16 on: FOLDER contains
that Keras, unpacked, for this peer alone. All processes are pinned and have one thread per core.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

from models import COMPARED, MODELS
from programs import (
    BOTH_CORES,
    CEILING,
    DATA_PARALLEL,
    DDP,
    DDP_CEILING,
    KERAS_DDP,
    KERAS_DDP_FUSED,
    LOCKSTEP,
    MODEL_PARALLEL,
    MWMS,
    ONE_WORKER,
    PEERS,
    PLAIN,
    SEAM,
    TF_BOTH_CORES,
    PeerProgram,
    Work,
    beyond_keras,
    nightly_keras,
    peer_programs,
    plain_keras,
    train_lockstep,
)
from report import print_regime
from results import Ratio, Results
from turns import FailedError, take_turns

TURNS = 5
TRIAL_TURNS = 2
"""The turns after which the slower variant of a program is stopped."""
RATIOS = [
    Ratio("two workers against keras DataParallel", LOCKSTEP, DATA_PARALLEL, "1.00"),
    Ratio("two workers against keras ModelParallel", LOCKSTEP, MODEL_PARALLEL, "1.00"),
    Ratio("two workers against tf_keras, MWMS", LOCKSTEP, MWMS, "1.00"),
    Ratio("two workers against ddp of keras", LOCKSTEP, KERAS_DDP, "1.00"),
    Ratio("two workers against ddp of keras, fused Adam", LOCKSTEP, KERAS_DDP_FUSED, "1.00"),
    Ratio("two workers against ddp", LOCKSTEP, DDP, "1.80"),
    Ratio("two workers against one process, both cores", LOCKSTEP, BOTH_CORES, "1.20"),
    Ratio("two workers against tensorflow, both cores", LOCKSTEP, TF_BOTH_CORES),
    Ratio("two workers against their ceiling", LOCKSTEP, CEILING, "0.95"),
    Ratio("ddp against its ceiling", DDP, DDP_CEILING),
    Ratio("one worker, two replicas, against keras", ONE_WORKER, PLAIN),
    Ratio("one replica against keras", SEAM, PLAIN, "0.95"),
]


def measure(backend: str, work: Work, others: list[PeerProgram], folder: Path) -> None:
    if MWMS in [peer.name for peer in others] and importlib.util.find_spec("tf_keras") is None:
        # Not in the extra `bench`: it requires `tensorflow`, which would replace files of tensorflow-cpu.
        raise FailedError("this needs Keras 2: pip install --no-deps tf_keras, of TensorFlow's minor version")
    programs = [
        train_lockstep(name, workers, replicas, backend, work, folder / name)
        for name, workers, replicas in ((LOCKSTEP, 2, 2), (ONE_WORKER, 1, 2), (SEAM, 1, 1))
        if name == LOCKSTEP or PLAIN in [peer.name for peer in others]
    ]
    programs += [program for peer in others for program in peer_programs(peer, work)]
    regime = take_turns(
        folder,
        programs,
        work.turns,
        TRIAL_TURNS,
        lambda: Results(backend, programs, work).without_slower_variants(),
    )
    measured = Results(backend, [each for each in programs if len(each.answers) == work.turns], work)
    measured.check()
    print(
        f"{MODELS[work.model].title} on {backend}, {work.batch} examples per replica, {work.turns} turns of "
        f"{work.steps} steps: median (p10-p90)"
    )
    print_regime(regime)
    measured.report()
    for ratio in RATIOS:
        measured.report_ratio(ratio)


def main(
    backend: str,
    model: str = "cnn",
    turns: int = TURNS,
    steps: int | None = None,
    *,
    further: bool = False,
    nightly: str = "",
) -> None:
    if nightly:
        others = nightly_keras(nightly) + PEERS[backend]
    else:
        others = beyond_keras(backend) if further else plain_keras(backend) + PEERS[backend]
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
            measure(backend, Work.of(model, turns, steps), others, Path(folder))
    except FailedError as error:
        sys.exit(f"{model} on {backend}: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="jax", choices=PEERS)
    parser.add_argument("model", nargs="?", default="cnn", choices=COMPARED)
    parser.add_argument("--turns", type=int, default=TURNS, help=f"more than {TRIAL_TURNS}")
    parser.add_argument("--steps", type=int, help="steps per turn")
    parser.add_argument("--further", action="store_true", help="the CNN against PyTorch's own model")
    parser.add_argument("--nightly", default="", metavar="FOLDER", help="with Keras 3.16, for its strategy")
    options = parser.parse_args()
    if options.further and MODELS[options.model].torch is None:
        parser.error(f"--further: {options.model} has no twin in PyTorch")
    if options.nightly and (options.backend != "torch" or options.further):
        parser.error("--nightly: for torch, without --further")
    if options.nightly and MODELS[options.model].batch_statistics:
        parser.error(f"--nightly: its processes have different moving averages of {options.model}")
    main(
        options.backend,
        options.model,
        options.turns,
        options.steps,
        further=options.further,
        nightly=options.nightly,
    )
