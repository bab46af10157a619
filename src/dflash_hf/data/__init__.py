"""Rows, prompts and images: read, checked and written; the client of a server that answers them."""
