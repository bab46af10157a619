"""What decoding remembers: keys and values of ragged rows, recurrent states, the draft's newest context."""
