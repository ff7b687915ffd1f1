"""Moves KV between an engine's paged memory and contiguous pages, as it is or converted.

Each kernel stands beside its torch reference; a wrapper checks device, dtype, shape and strides
before a launch. CPU tensors never go through Triton's interpreter: that is for tests. Must not be
here: the store, tiers, engines, and any guess what a shape means.

There is no checksum kernel, on purpose; it would have to be XXH3-128, bit for bit. In XXH3 only the
scrambling after each KiB is a chain: 2,048 steps of about 50 cycles for a 2 MiB page, 60 us, 35
GB/s; pages side by side would reach the memory's speed, and a processor's core does 10 to 30 GB/s.
So a kernel could be faster, and would spare nothing: the server hashes its own copy of what a
worker wrote, since it can't believe the worker, and what lies between, PCIe at 25 to 50 GB/s, has
CRCs of its own. This is arithmetic: no GPU was at hand to try.
"""
