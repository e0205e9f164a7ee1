"""Who may do what: keys, their scopes and models, and the one decision; nothing here knows HTTP or gRPC."""
