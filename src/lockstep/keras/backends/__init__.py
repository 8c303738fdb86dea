"""The differences between the backends: one file each, behind one contract. No data is exchanged here."""
