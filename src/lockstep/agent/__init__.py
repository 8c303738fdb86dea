"""One a host: starts, watches and ends the workers of that host; it decides nothing about the job."""
