"""The exchange between processes on one host, in shared memory; nothing crosses hosts."""
