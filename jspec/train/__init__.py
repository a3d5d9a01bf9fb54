"""Training drafters: pure losses, and what feeds them."""
