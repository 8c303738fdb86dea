"""The exchange between processes on one host: sums over shared memory; nothing crosses machines."""
