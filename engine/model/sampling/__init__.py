"""From the hidden states of a step to what it gives: tokens, log-probabilities, embeddings."""
