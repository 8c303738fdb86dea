"""The exchange between processes on one host, in shared memory. Nothing crosses hosts."""
