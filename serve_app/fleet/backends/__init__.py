"""Files that run inside Triton's stubs, not in this package; packages only so that they are installed."""
