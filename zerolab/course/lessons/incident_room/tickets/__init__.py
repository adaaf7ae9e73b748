"""The twelve tickets: each file has the engine as it was found, a repaired one, and what its check knows."""
