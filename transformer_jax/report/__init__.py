"""Training report in HTML: curves, results, translations, attention, settings."""
