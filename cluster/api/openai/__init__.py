"""OpenAI's chat and text completions: what is accepted, planned, generated, answered."""
