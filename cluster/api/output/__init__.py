"""What a model wrote, told apart: reasoning, text and tool calls, by the model family's format."""
