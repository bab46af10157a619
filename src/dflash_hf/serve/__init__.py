"""An OpenAI-style server for a pair: Transformers' own handlers, whose `generate` gets the draft."""
