"""Attention of one device by itself, once keys and values are there.

==============  ============================================================================
file            what it is
==============  ============================================================================
alone           attention to tokens in the order of positions, by the machine's kernel
packed          all of a causal device's attention by one call of a kernel that takes parts
device_blocks   attention to the keys of one device at a time
merging         the merge of results by their log-sum-exp
masked          attention by XLA with masks that are made of positions
==============  ============================================================================
"""
