"""Speaks to inference engines; engine types appear here and nowhere else.

Lives here: page layouts, the transformers cache, the demo. Must not be here: storage, eviction,
anything that another engine would need too.
"""
