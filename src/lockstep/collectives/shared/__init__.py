"""Members that are processes of one host: sums over shared memory; nothing that crosses machines."""
