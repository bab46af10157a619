"""This package is the chat of `dflash-hf chat`: conversations about images, in a terminal or on a web page."""
