"""Starts worker processes: backend, devices, fork server and main program. It does not watch them."""
