"""Where two runs part, from their digest logs, and how a run is repeated; it changes no run."""
