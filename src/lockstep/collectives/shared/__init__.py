"""The communicator of members that are processes of one host: sums over shared memory, nothing between hosts.

    futex             waiting for a word in shared memory
    pool              the memory for partials and totals, kept from one view to the next
    control_segment   the memory of a barrier; new for each view
    barrier           announces a call, arrives, waits, compares the calls, and passes small blobs
    slice_reduce      large totals: each member sums a slice
    packed_reduce     small totals: every member sums everything
    buffers           one member's mapping of the pool
    communicator      the collective calls: which barriers each has, and what happens between them

A module imports only modules above it.
"""
