"""The tasks of a cluster and their addresses, from `TF_CONFIG`, Slurm or Kubernetes."""
