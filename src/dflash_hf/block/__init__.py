"""This package describes a block of tokens that is verified at once: positions, tree, masks, and its cache's name."""
