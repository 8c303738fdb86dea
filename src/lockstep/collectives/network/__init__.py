"""The exchange between workers of several hosts: shared memory inside a host, streams between hosts."""
