"""Supervision: pure functions of state, event and time that decide what a job does. No process, no clock."""
