"""Making a release."""
