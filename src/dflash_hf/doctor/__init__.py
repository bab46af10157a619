"""What ruins a draft's acceptance without changing a text, and how it is found."""
