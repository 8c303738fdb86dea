"""The command `lockstep`, for jobs with a hold.

holding.py SECONDS ARGUMENT...
"""

import functools
import sys

from lockstep.cli import job_options
from lockstep.cli.main import main
from lockstep.protocol.job_spec import JobSpec

held = functools.partial(JobSpec, hold=float(sys.argv.pop(1)))
held.seed = JobSpec.seed  # type: ignore[attr-defined]
job_options.JobSpec = held  # type: ignore[misc,assignment]
main()
