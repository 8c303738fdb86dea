"""Every message between processes, and what a job is asked to be; no sockets."""
