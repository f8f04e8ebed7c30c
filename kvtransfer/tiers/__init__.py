"""The tiers of a worker below its device memory."""
