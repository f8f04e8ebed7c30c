"""GGUF files: read, and converted once to a Hugging Face directory."""
