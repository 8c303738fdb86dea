"""The events of a run, the bus that publishes them, and where they are written or shown. No decisions."""
