"""`dflash-hf bench`: sets of questions, ways of decoding them, what is counted of the answers, and the report."""
