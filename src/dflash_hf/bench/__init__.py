"""This package is `dflash-hf bench`: sets of questions, ways of decoding, counts of the answers, and the report."""
