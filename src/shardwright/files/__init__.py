"""The borders: cluster files, plan files, units as people write them, published hardware."""
