"""Token ids -> page keys -> the longest stored chain. Pure: no I/O, no clock, no torch.

Lives here: page keys, the page table, the radix tree. Must not be here: bytes of pages, files,
sockets, policies, or any import of another room.
"""
