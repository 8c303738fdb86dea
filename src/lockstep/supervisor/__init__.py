"""What follows from an event in a job: pure functions of state, event and time; no process, no clock."""
