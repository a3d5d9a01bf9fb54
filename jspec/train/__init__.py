"""Training drafters: corpora, the target's features, objectives and the loop."""
