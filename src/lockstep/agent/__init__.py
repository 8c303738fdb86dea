"""The agent of a host starts, watches and ends the host's workers. It makes no decisions about the job."""
