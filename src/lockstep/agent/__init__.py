"""The agent of a host starts, watches and ends the workers of the host. It decides nothing about the job."""
