"""The input of replicas: inputs of Keras's own loops, and datasets that a program distributes itself."""
