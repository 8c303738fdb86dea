"""What a job needs once for all of its hosts: commands of other terminals, and what a run says of itself."""
