"""What starts, watches and ends the workers of one host; it decides nothing about the job."""
