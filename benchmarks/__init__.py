"""Commands that measure; each prints what it found, beside what it is compared with."""
