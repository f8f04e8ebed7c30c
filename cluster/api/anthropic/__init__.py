"""Anthropic's messages: what is accepted and answered. Inside, a request is a chat of OpenAI's."""
