"""What versions of KVRelay say to each other, and what they leave to each other in files."""
