"""What differs between the backends, one file each behind one contract; nothing that exchanges data."""
