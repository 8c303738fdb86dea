"""Starting worker processes: backend, devices, fork server and main program; supervision is elsewhere."""
