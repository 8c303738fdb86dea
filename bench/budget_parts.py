"""The parts of a step, as reports name them, in the order in which they come."""

INPUT = "input: the batch, and the replica's rows"
COMPUTING = "forward and backward"
CHECKING = "hash of the batch"
PUBLISHING = "publish"
WAITING_FIRST = "wait until all have published"
SUMMING = "sum"
WAITING_LAST = "wait until all have summed"
APPLYING = "update"
LOCKSTEP = "Lockstep's own Python"
CALLBACKS = "callbacks"
KERAS = "Keras's own loop, an epoch's begin and end"

PARTS = (
    INPUT,
    COMPUTING,
    CHECKING,
    PUBLISHING,
    WAITING_FIRST,
    SUMMING,
    WAITING_LAST,
    APPLYING,
    LOCKSTEP,
    CALLBACKS,
    KERAS,
)
