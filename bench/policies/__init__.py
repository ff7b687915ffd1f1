"""Policies that the store does not ship, to compare those that it does with. See bench/eviction.py.

All obey the leaf rule, as the simulator's tree does that for them. Where a policy is defined on one
queue with a hand, it is put into scores here, which each docstring says how.
"""
