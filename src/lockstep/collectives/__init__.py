"""Sums along one fixed tree, with interchangeable transports.

    contract    what every communicator promises
    plan        which replicas are added in which order, and which member publishes which sums; pure
    layout      shapes, dtypes and offsets of the arrays of a partial; pure
    adder       executes planned sums on arrays
    call        describes a collective call, compares those of the members, and bounds the wait for them
    loopback    the communicator of a single worker, and of members that are threads
    shared/     the communicator of members that are processes of one host

A module imports only modules above it.
"""
