"""serve_app: Ray Serve in front of NVIDIA Triton."""
