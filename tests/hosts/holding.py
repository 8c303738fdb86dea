"""The command `lockstep`, for jobs with a hold.

holding.py SECONDS ARGUMENT...
"""

import functools
import sys

from lockstep.cli import job_options
from lockstep.cli.main import main
from lockstep.protocol.job_spec import JobSpec

job_options.JobSpec = functools.partial(JobSpec, hold=float(sys.argv.pop(1)))  # type: ignore[misc,assignment]
main()
