"""Ratios between ways to serve the same model on this machine, measured in turn in one run: `make bench`."""
