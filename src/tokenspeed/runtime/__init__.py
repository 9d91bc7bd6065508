"""The engine: everything that the ranks run, and what the front says to them."""
