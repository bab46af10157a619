"""This package reads and writes the checkpoint formats. It recognises a format by the content of its config."""
