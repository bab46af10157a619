"""This package reads, checks and writes rows, prompts and images, and has a client of servers that answer prompts."""
