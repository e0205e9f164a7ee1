"""The fleet: where `tritonserver` is on a node, how one is started, watched, healed and stopped, and who has leased."""
