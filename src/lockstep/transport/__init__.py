"""Transports of messages and states on one machine: sockets, queues and memory."""
