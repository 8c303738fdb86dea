"""The input of replicas: of Keras's own loops, and of distributed datasets; it computes no step."""
