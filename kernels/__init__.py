"""Gather, scatter and convert between an engine's paged KV and the store's pages.

Lives here: each kernel with its reference and its checks. Must not be here: storage, sessions, or
any import of another room. The first kernels land with the device tier.
"""
