"""How a worker process starts: backend, devices, fork server, main program; nothing that watches it."""
