"""How messages and states travel on one host: sockets, queues and memory; no meaning of a message."""
