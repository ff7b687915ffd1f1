"""Moves KV between an engine's paged memory and contiguous pages, as it is or converted.

Each kernel stands beside its torch reference; a wrapper checks device, dtype, shape and strides
before a launch. CPU tensors never go through Triton's interpreter: that is for tests. Must not be
here: the store, tiers, engines, and any guess what a shape means.

There is no checksum kernel, on purpose. XXH3-128 of one page is one chain of 64-byte steps on eight
lanes: a page can't be spread over a GPU, so a kernel is slow unless hundreds of pages are hashed at
once. And the server hashes its own copy of what a worker wrote anyway (it must not believe the
worker), while those bytes lie in the cache: measured under 5 % of the way from disk to arena.
"""
