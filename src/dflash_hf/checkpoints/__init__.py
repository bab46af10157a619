"""The checkpoint formats: read, written, told apart by what a config says."""
