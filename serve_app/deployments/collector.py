"""`@serve.batch` as the runner's collector: it gathers a window's requests and hands them on, waiting for nothing.

The batch function returns at once with one future for each request. So a batch of Ray Serve is never "under way":
no caller waits for the answers to its window-mates, a cancelled caller withdraws its own request only, and which
rows share a ModelInfer is decided by the dispatcher when it holds a permit, not by the window.
"""
