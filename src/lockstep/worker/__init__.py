"""What runs in a worker below Keras: its job and views, seeds, import hooks, the script; no framework."""
