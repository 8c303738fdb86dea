"""How messages and states travel on one machine: sockets, queues and memory behind the contracts."""
