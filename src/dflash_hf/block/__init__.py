"""A block of tokens that is verified at once: positions, tree, masks, and the name of its cache."""
