"""The events of a run, the bus that publishes them, the event log and the console; no decisions."""
