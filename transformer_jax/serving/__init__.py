"""A translation service for programs (LibreTranslate's API) and, with a page, for people."""
