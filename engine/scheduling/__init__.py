"""What goes into the next step: prompts, decodes, draft tokens."""
