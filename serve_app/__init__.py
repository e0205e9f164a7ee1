"""serve_app: Ray Serve in front of NVIDIA Triton."""

__version__ = "0.1.0"
