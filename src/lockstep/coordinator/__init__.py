"""One a job: has the supervisor decide, tells agents what to do, and answers people; it starts no process."""
