"""A page about training runs: curves, results, translations, attention, settings."""
