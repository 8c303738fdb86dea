"""The input of replicas: inputs of Keras's own loops, and distributed datasets. It does not compute steps."""
