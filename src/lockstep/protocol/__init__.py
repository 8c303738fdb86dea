"""Every message between processes, what a channel promises, and what a job is asked to be; no sockets."""
