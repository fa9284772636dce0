"""A page about training runs: curves, figures, translations, attention, settings."""
