"""Micro-batching: what may share a ModelInfer, how it is merged and split, and when it is sent.

`signature`, `merge`, `split`, `plan` and `isolation` are pure and never see a clock or a queue; `dispatcher` is the
only module here that awaits.
"""
