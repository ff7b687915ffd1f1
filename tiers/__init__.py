"""Bytes of pages under a slot number, one medium a file, and the policies between media.

Lives here: the tier contract, the host arena, the disk tier (segments + catalog), eviction.
Must not be here: tokens' meaning, sessions, leases, or any import of another room.
"""
