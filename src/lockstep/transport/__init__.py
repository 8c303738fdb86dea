"""How messages and states travel: sockets, queues and memory. It does not know the meaning of messages."""
