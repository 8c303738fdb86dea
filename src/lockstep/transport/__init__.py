"""How messages and states travel on one machine: the implementations of the contracts in `protocol`."""
