"""Ray finds the nodes of a job, starts an agent on each, and keeps the coordinator alive."""
