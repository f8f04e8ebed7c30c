"""OpenAI's Responses: what is accepted, kept and answered. Inside, a request is a chat."""
