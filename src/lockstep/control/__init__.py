"""Starting, watching and ending the workers of a job."""
