"""All that uses Keras or a backend, and the only room that does; nothing that starts or watches workers."""
