"""The input of replicas: inputs of Keras's own loops, and distributed datasets; it computes no step."""
