"""What the benchmark scripts share: the pair, the ways of decoding, the clock, the machine, the rows."""
