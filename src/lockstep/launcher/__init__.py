"""How worker processes start: backend, devices, fork server and main program; nothing that watches them."""
