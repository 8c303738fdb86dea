"""Runs programs of this folder one after the other in one process: starting one takes seconds.

    together.py PROGRAM ARGUMENT... [-- PROGRAM ARGUMENT...]...

Prints `begins PROGRAM ARGUMENT...` before what each prints.
"""

import itertools
import sys

import keras
import losses
import options
import program
import rounds

from lockstep.worker.script_seed import forget_script_seed

PROGRAMS = {
    "program": program.main,
    "options": lambda: program.main(options.OPTIONS),
    "losses": losses.main,
    "rounds": rounds.main,
}


def main() -> None:
    for divides, group in itertools.groupby(sys.argv[1:], lambda argument: argument == "--"):
        if not divides:
            name, *sys.argv[1:] = group
            # As in a new process, Keras numbers generated names from the start.
            keras.utils.clear_session()
            forget_script_seed()
            print("begins", name, *sys.argv[1:])
            PROGRAMS[name]()


if __name__ == "__main__":
    main()
