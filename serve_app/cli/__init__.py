"""The command line `serve-app`: one module per command, assembled in `main`."""
