"""The messages between processes, the contract of a channel, and the specification of a job. No sockets."""
