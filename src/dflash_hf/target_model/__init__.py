"""This package handles the target: its parts, the checks of what is supported, taps, its attention and its fast
layers.
"""
