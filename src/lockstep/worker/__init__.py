"""The parts of a worker below Keras: its job and views, seeds, import hooks, the script. No framework."""
