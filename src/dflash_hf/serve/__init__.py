"""An OpenAI-style server for a pair, whose `generate` gets the draft."""
