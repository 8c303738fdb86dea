"""The first difference of two runs, from their digest logs, and how a run is repeated; it changes no run."""
