"""The tiers of a worker of several ranks: each rank has its share of every block in memory, and in files, of its own."""
