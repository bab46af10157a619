"""This package holds the caches of decoding: keys and values of ragged rows, recurrent states, the draft's newest
context.
"""
