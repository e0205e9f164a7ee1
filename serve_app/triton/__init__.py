"""Talking to Triton servers: channels, pools of them, the choice between servers, and a fake server for tests."""
