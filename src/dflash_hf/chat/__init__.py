"""The chat of `dflash-hf chat`: conversations about pictures, in a terminal or on a web page."""
