"""The ways in: HTTP and gRPC. Each decodes to `dataplane` calls and encodes what comes back."""
